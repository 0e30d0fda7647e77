"""The default model through the whole fleet against one colocated worker, by the openai client.

    python -m benchmarks.fleet_equality [--prompts 30] [--json FILE]

Starts `plait serve --colocated`, then `plait serve` (a prefill group of two ranks, a decode worker)
with the default model as a newcomer has it, streams the same prompts from both, greedy and seeded,
among them prompts longer than one rank's KV and than index_topk, and compares token for token.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.progress import track

RANK_TOKENS = 1024
MODEL = "smollm2-135m-dsv32"
URL = re.compile(r"ready after .*(http://\S+)")


def asks(num: int) -> list[dict[str, Any]]:
    draw = random.Random(5)
    words = ["river", "stone", "bread", "moon", "train", "old", "blue", "seven", "happy", "music"]
    asked = []
    for number in range(num):
        num_words = (2, 20, 90, 300, 1200)[number % 5]
        text = "Tell me about: " + " ".join(draw.choice(words) for _ in range(num_words)) + "?"
        chosen = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": number}
        asked.append(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": draw.randrange(4, 33),
                "logprobs": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **chosen,
            }
        )
    return asked


def answers(url: str, asked: list[dict[str, Any]], title: str) -> list[tuple[list[str], str, int]]:
    """For each: the tokens, the finish reason, the prompt's length."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    told = []
    for ask in track(asked, title, console=Console(stderr=True)):
        tokens, reason, prompt = [], "", 0
        for chunk in client.chat.completions.create(**ask):
            for choice in chunk.choices:
                tokens += (
                    [entry.token for entry in (choice.logprobs.content or [])]
                    if choice.logprobs
                    else []
                )
                reason = choice.finish_reason or reason
            prompt = chunk.usage.prompt_tokens if chunk.usage else prompt
        told.append((tokens, reason, prompt))
    return told


def serve_and_ask(flags: list[str], asked: list[dict[str, Any]], title: str) -> Any:
    command = [sys.executable, "-m", "server", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(match[1] for line in process.stdout if (match := URL.search(line)))
        started = time.monotonic()
        told = answers(url, asked, title)
        return told, time.monotonic() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    asked = asks(args.prompts)
    one, one_s = serve_and_ask(["--colocated", "--max-total-tokens", "8192"], asked, "colocated")
    fleet, fleet_s = serve_and_ask(
        ["--prefill-max-total-tokens", str(RANK_TOKENS), "--decode-max-total-tokens", "8192"],
        asked,
        "fleet",
    )
    equal = sum(a == b for a, b in zip(one, fleet, strict=True))
    longest = max(prompt for *_, prompt in one)
    found = {
        "prompts": len(asked),
        "equal": equal,
        "tokens": sum(len(tokens) for tokens, *_ in one),
        "longest_prompt": longest,
        "rank_tokens": RANK_TOKENS,
        "colocated_s": one_s,
        "fleet_s": fleet_s,
    }
    for number, (a, b) in enumerate(zip(one, fleet, strict=True)):
        if a != b:
            print(f"prompt {number}: {a} against {b}")
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if equal == len(asked) and longest > RANK_TOKENS else 1


if __name__ == "__main__":
    sys.exit(main())
