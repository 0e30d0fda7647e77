"""How much of a hand-off hides under the prefill: the default model through the whole fleet.

    python -m benchmarks.overlap [--prompts 6] [--json FILE]

Sends long prompts one after another through `plait serve` and reads from /metrics, for them all:
seconds in which a rank's writes ran, and the tail, from the first token's being out until all ranks
have reported, which is what a request waits for beyond its prefill.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from benchmarks.fleet_equality import MODEL, URL
from tests.served import Metrics

WORDS = ["river", "stone", "bread", "moon", "train", "old", "blue", "seven", "happy", "music"]


def ask(url: str, number: int, num_words: int) -> int:
    """A prompt that shares nothing with the others; its tokens."""
    text = " ".join(WORDS[(i * i + number * (i + 3)) % len(WORDS)] for i in range(num_words))
    body: dict[str, Any] = {"model": MODEL, "prompt": f"{number} {text}", "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False).json()
    return int(answer["usage"]["prompt_tokens"])


def read(url: str) -> dict[str, float]:
    seen = Metrics(httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text)
    found = {
        "tail_s": seen("plait_handoff_tail_seconds_sum"),
        "prefill_s": seen("plait_prefill_seconds_sum", 'role="prefill"'),
        "bytes": seen("plait_handoff_bytes_sent_total"),
    }
    for rank in (0, 1):
        name = "plait_handoff_write_seconds_total"
        found[f"write_s_rank{rank}"] = seen(name, f'rank="{rank}"')
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--words", type=int, default=900)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    command = [sys.executable, "-m", "server", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(m[1] for line in process.stdout if (m := re.search(URL, line)))
        ask(url, 1000, args.words)
        before = read(url)
        numbers = track(range(args.prompts), console=Console(stderr=True))
        tokens = sum(ask(url, number, args.words) for number in numbers)
        after = read(url)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    found = {name: after[name] - before[name] for name in after}
    writes_s = max(found["write_s_rank0"], found["write_s_rank1"])
    found |= {"prompt_tokens": tokens, "hidden_share": max(0.0, 1 - found["tail_s"] / writes_s)}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
