"""What prefix-aware routing is worth: the share of prompt tokens that come from caches.

    python -m benchmarks.conversations [--conversations 10] [--turns 6] [--json FILE]

Two prefill groups and two decode workers of a small random model serve conversations turn by turn,
all at once, under each policy. Prints a table; exits with 1 where an answer differs by policy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from engine.pull.cache import default_model_path
from tests.e2e.asking import client_of
from tests.served import Served, serving
from tests.tiny import save_dsa_chat

POLICIES = ("prefix", "least-loaded", "round-robin")
ANSWER_TOKENS = 40
FLEET = ["--prefill-groups", "2", "--prefill-cp-size", "1", "--decode-workers", "2"]


@dataclass
class Row:
    policy: str
    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    best_share: float  # whole pages of all that was said before in the conversation
    matched_tokens: int  # what the router took for cached
    pages_sent: int


async def converse(
    http: httpx.AsyncClient, number: int, turns: int
) -> tuple[list[str], int, int, int]:
    """The answers; prompt tokens, those from caches, and those that could have been."""
    messages: list[dict[str, str]] = []
    answers, prompt, cached, could, before = [], 0, 0, 0, 0
    for turn in range(turns):
        question = f"Conversation {number}, question {turn}: " + "what about rivers and bread? " * 6
        messages.append({"role": "user", "content": question})
        body: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0}
        body |= {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        text = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
        usage = answer["usage"]
        prompt += usage["prompt_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        could += before // 64 * 64
        before = usage["prompt_tokens"]
    return answers, prompt, cached, could


async def measure(served: Served, policy: str, num: int, turns: int) -> tuple[Row, list[list[str]]]:
    async with client_of(served) as http:
        told = await asyncio.gather(*(converse(http, number, turns) for number in range(num)))
    prompt, cached, could = (sum(t[i] for t in told) for i in (1, 2, 3))
    seen = served.metrics()
    row = Row(
        policy,
        prompt,
        cached,
        cached / prompt,
        could / prompt,
        int(seen("plait_router_matched_tokens_total")),
        int(seen("plait_handoff_pages_sent_total")),
    )
    return row, [answers for answers, *_ in told]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, told = [], []
    with tempfile.TemporaryDirectory() as scratch:
        model = save_dsa_chat(Path(scratch) / "tiny", default_model_path())
        for policy in POLICIES:
            flags = [*FLEET, "--router-policy", policy, "--max-total-tokens", "65536"]
            with serving(model, *flags) as served:
                served.wait_ready()
                row, answers = asyncio.run(measure(served, policy, args.conversations, args.turns))
                served.stop()
            rows.append(row)
            told.append(answers)
    table = Table(*asdict(rows[0]))
    for row in rows:
        table.add_row(
            *(f"{v:.3f}" if isinstance(v, float) else str(v) for v in asdict(row).values())
        )
    Console(width=130, highlight=False).print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(answers == told[0] for answers in told) else 1


if __name__ == "__main__":
    sys.exit(main())
