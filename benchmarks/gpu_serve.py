"""`plait serve` on a GPU as a client sees it, and beside it prefill and decode that share the card.

    python -m benchmarks.gpu_serve [--split] [--dtype auto float32] [--json FILE]

The default model, asked by the openai client: eight prompts at once, whole and streamed, a long
one twice for the prefix cache, then speed: one stream, and 64 requests at once. In the end nothing
may be left, of requests at /metrics and of processes after SIGTERM. --split asks the same of
`plait prefill`, `decode` and `frontend` on the same GPU and compares token by token. Exits with 1
where something is not equal or is left.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from openai import OpenAI
from rich.console import Console
from rich.table import Table

from engine.process import unwind_when_asked
from engine.pull.cache import DEFAULT_MODEL
from engine.pull.default_model import ensure_default_model
from engine.types import Role
from tests.served import CORES, FrontEnd, Metrics

PROMPTS = [
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write a short poem about the sea.",
    "How many legs does a spider have?",
    "Explain in one sentence why the sky is blue.",
    "Give me a recipe for pancakes.",
    "Who wrote the play Hamlet?",
    "Translate to French: Good morning, my friend.",
]
STORY = "The river ran past the old mill and the children played there. " * 12  # some pages of KV
LONG_PROMPT = f"Here is a story. {STORY}Question: where did the children play?"
CROWD = [f"Tell me a story about the number {i}." for i in range(64)]
NUM_TOKENS = {"cuda": (400, 256), "cpu": (48, 2)}  # of the one stream; of each of the crowd
NEAR_TIE = 0.25  # nats: two steps of bfloat16 from 16 to 32
TRANSFER = "tcp"
IDLE_LIMIT_S = 40.0
READY = re.compile(r"ready at (ipc|tcp)://")


class Token(NamedTuple):
    text: str
    best: list[float]  # the log-probabilities of the two likeliest there

    @property
    def margin(self) -> float:
        return self.best[0] - self.best[1]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish_reason: str
    usage: tuple[int, int]  # tokens of the prompt, of the answer
    num_cached: int = 0  # of the prompt
    tokens: list[Token] = field(default_factory=list)  # where log-probabilities are asked for
    first_s: float = 0.0  # until a stream's first text
    seconds: float = 0.0


def ask(client: OpenAI, prompt: str, stream: bool = False, **more: Any) -> Answer:
    body = {"model": DEFAULT_MODEL, "temperature": 0, "max_tokens": 48, "stream": stream, **more}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    text, reason, usage, tokens, first_s = "", "", None, [], 0.0
    began = time.monotonic()
    messages: Any = [{"role": "user", "content": prompt}]
    told: Any = client.chat.completions.create(messages=messages, **body)
    for part in told if stream else [told]:
        for choice in part.choices:
            if said := (choice.delta if stream else choice.message).content:
                first_s = first_s or time.monotonic() - began
                text += said
            for token in choice.logprobs.content if choice.logprobs else ():
                tokens.append(Token(token.token, [one.logprob for one in token.top_logprobs]))
            reason = choice.finish_reason or reason
        usage = part.usage or usage
    assert usage is not None, "no usage was told"
    seconds = time.monotonic() - began
    num_cached = usage.prompt_tokens_details.cached_tokens
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return Answer(text, reason, counts, num_cached, tokens, first_s, seconds)


def at_once(client: OpenAI, prompts: list[str], **more: Any) -> list[Answer]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(client, prompt, **more), prompts))


def unlike(one: Answer, other: Answer) -> str:
    """What is not equal of all that a client may rely on, in words; "" where nothing is."""
    a, b = ((each.text, each.finish_reason, each.usage) for each in (one, other))
    return "" if a == b else f"{a} and {b}"


def parting(one: list[Token], other: list[Token]) -> tuple[str, bool]:
    """Where the tokens part, in words, "" where they do not, and whether it is nearly a tie there:
    to both, or to the one that goes on where the other ends."""
    texts = zip_longest((token.text for token in one), (token.text for token in other))
    at = next((i for i, (a, b) in enumerate(texts) if a != b), None)
    if at is None:
        return "", False
    there = [tokens[at] for tokens in (one, other) if at < len(tokens)]
    said = " and ".join(f"{token.text!r} by {token.margin:.2g} nats" for token in there)
    is_near_tie = all(token.margin <= NEAR_TIE for token in there)
    return f"token {at} of {len(one)} and {len(other)}: {said}", is_near_tie


def compare(
    colocated: list[Answer], split: list[Answer], dtype: str, wrong: list[str]
) -> dict[str, Any]:
    """16 bits: sums in another order may turn what is nearly a tie; float32 has to be equal."""
    ties: list[str] = []
    gaps, num_equal = [0.0], 0
    for prompt, a, b in zip(PROMPTS, colocated, split, strict=True):
        text, is_near_tie = parting(a.tokens, b.tokens)
        if text:
            excused = is_near_tie and dtype != "float32"
            (ties if excused else wrong).append(f"{prompt!r} parts from colocated at {text}")
            continue
        num_equal += 1
        pairs = zip(a.tokens, b.tokens, strict=True)
        gaps += [abs(x.best[0] - y.best[0]) for x, y in pairs]
    return {"equal_prompts": num_equal, "near_ties": ties, "logprobs_within": max(gaps)}


def busy(seen: Metrics) -> dict[str, float]:
    """What an idle fleet has none of."""
    names = ["requests_running", "requests_waiting", "worker_running_requests"]
    found = {n: seen(f"plait_{n}") for n in [*names, "worker_waiting_requests", "handoff_rooms"]}
    for state in ("held", "locked", "fenced"):
        found[f"{state} pages"] = seen("plait_pool_pages", f'state="{state}"')
    return {name: value for name, value in found.items() if value}


def commands(is_split: bool, device: str, dtype: str, folder: str) -> dict[str, list[str]]:
    """By name, in the order in which they start; the last one serves HTTP."""
    model = ["--dtype", dtype, "--device", device if device == "cpu" else f"{device}:0"]
    model += ["--max-total-tokens", "16384"] if device == "cpu" else []
    if not is_split:
        return {"serve": ["serve", "--colocated", "--port", "0", *model]}
    told = {}
    for role, share in (("prefill", "0.3"), ("decode", "0.6")):
        told[role] = [role, *model, "--listen", f"ipc://{folder}/{role}"]
        told[role] += ["--transfer-protocol", TRANSFER, "--mem-fraction-static", share]
    told["prefill"] += ["--prefill-cp-size", "1"]
    workers = ",".join(f"ipc://{folder}/{role}" for role in told)
    return told | {"frontend": ["frontend", "--port", "0", "--workers", workers]}


def use(client: OpenAI, device: str) -> tuple[dict[str, Any], list[Answer]]:
    """All that a client does: what it finds, and the prompts' answers with their tokens."""
    wrong = []
    # Steps with log-probabilities wait for the host; of the others the device runs ahead.
    answers = at_once(client, PROMPTS, logprobs=True, top_logprobs=2)
    streams = at_once(client, PROMPTS, stream=True)
    first, again = (ask(client, LONG_PROMPT) for _ in range(2))
    pairs = [*zip(PROMPTS, answers, streams, strict=True), ("again: " + LONG_PROMPT, first, again)]
    for prompt, one, other in pairs:
        if text := unlike(one, other):
            wrong.append(f"{prompt[:40]!r} is answered by {text}")
    if not again.num_cached:
        wrong.append("the second time of a long prompt found nothing in the prefix cache")
    num_stream, num_each = NUM_TOKENS[device]
    endless = {"extra_body": {"ignore_eos": True}}
    stream = ask(client, "Tell me about the sea.", True, max_tokens=num_stream, **endless)
    began = time.monotonic()
    crowd = at_once(client, CROWD, max_tokens=num_each, **endless)
    crowd_s = time.monotonic() - began
    told = [answer.usage[1] for answer in (stream, *crowd)]
    if told != [num_stream, *[num_each] * len(CROWD)]:
        wrong.append(f"asked for {num_stream} tokens, and for {num_each} of each of many: {told}")
    return {
        "wrong": wrong,
        "cached_tokens": again.num_cached,
        "long_prompt_tokens": again.usage[0],
        "stream_first_text_s": round(stream.first_s, 3),
        "stream_tokens_per_s": round((num_stream - 1) / (stream.seconds - stream.first_s), 1),
        "crowd_tokens_per_s": round(len(CROWD) * num_each / crowd_s),
    }, answers


def measure(is_split: bool, device: str, dtype: str) -> tuple[dict[str, Any], list[Answer]]:
    """A fleet from its start to its end."""
    ready_s: dict[str, float] = {}
    started: dict[str, FrontEnd] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        try:
            for name, argv in commands(is_split, device, dtype, folder).items():
                began = time.monotonic()
                # On a GPU kernels are compiled first, by all cores.
                command = FrontEnd(*argv, cores=CORES[:1] if device == "cpu" else CORES)
                started[name] = command
                stack.callback(command.close)
                # One by one: a worker's share is of what those before it have left.
                command.wait_for(READY) if argv[0] in get_args(Role) else command.wait_serving()
                ready_s[name] = round(time.monotonic() - began, 1)
            url = f"{command.url}/v1"
            with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
                found, answers = use(client, device)
        except Exception:
            for name, command in started.items():
                print(f"--- {name} said:", *command.output().splitlines()[-40:], sep="\n")
            raise
        wrong: list[str] = found["wrong"]
        deadline = time.monotonic() + IDLE_LIMIT_S
        command.until(lambda: not busy(command.metrics()) or time.monotonic() > deadline)
        seen = command.metrics()
        if left := busy(seen):
            wrong.append(f"not idle after {IDLE_LIMIT_S:.0f} s: {left}")
        if is_split and not seen("plait_handoff_pages_sent_total"):
            wrong.append("no page was handed over")
        for name, command in reversed(started.items()):
            try:
                command.stop()
            except (AssertionError, subprocess.TimeoutExpired) as error:
                wrong.append(f"{name} after SIGTERM: {error}")
    what = {"dtype": dtype, "fleet": "split" if is_split else "colocated", "ready_s": ready_s}
    return what | found, answers


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=list(NUM_TOKENS))
    parser.add_argument("--split", action="store_true", help="prefill and decode apart, too")
    parser.add_argument("--dtype", nargs="+", default=["auto"], help="one by one (default: auto)")
    parser.add_argument("--source", type=Path, help="of the model, as for python -m engine.pull")
    parser.add_argument("--json", type=Path, help="write the results here; refused on a CPU")
    args = parser.parse_args()
    if args.json and args.device == "cpu":
        parser.error("--json: results of --device cpu are no GPU's; accepted with --device cuda")
    unwind_when_asked()
    ensure_default_model(given=args.source)
    rows = []
    for dtype in args.dtype:
        told = []
        for is_split in (False, True) if args.split else (False,):
            row, answers = measure(is_split, args.device, dtype)
            told.append(answers)
            if is_split:
                row |= compare(told[0], told[1], dtype, row["wrong"])
            rows.append(row)
            print(json.dumps(row), flush=True)
    names = [name for name in rows[0] if name != "wrong"]
    table = Table(*names)
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    Console(width=150, highlight=False).print(table)
    wrong = [f"{row['dtype']}, {row['fleet']}: {text}" for row in rows for text in row["wrong"]]
    for line in wrong:
        print(line)
    if args.json:
        packages = re.compile("torch|triton|mooncake-transfer-engine.*")
        there = importlib.metadata.distributions()
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "card": torch.cuda.get_device_name(),
            "packages": {d.name: d.version for d in there if packages.fullmatch(str(d.name))},
            "transfer": TRANSFER,
            "is_right": not wrong,
        }
        args.json.write_text(json.dumps(about | {"fleets": rows}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
