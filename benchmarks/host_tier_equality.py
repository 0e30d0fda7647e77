"""Ten thousand small requests with random prefixes over two tiers under pressure, each compared
with a cold run of itself.

    python -m benchmarks.host_tier_equality [--requests 10000] [--model gqa] [--cp 1] [--json FILE]

A small random model (Llama or DeepSeek-V3 with pages of 16 tokens; `dsa`: V3.2, with pages of 64,
which costs a laptop ten times as much), 64 requests at once, prompts in chunks, the KV pool and the
host pool both far too small for what is asked; each write policy gets the same third. Prompts begin
with a part of one of some documents, cut anywhere, and end in tokens of their own; lengths,
temperatures and seeds are mixed. Cold means asked with `prompt_logprobs`, which computes every
position of the prompt and takes nothing from a cache.

Prints a table; exits with 1 where a token differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from kvcache.host_plan import WritePolicy
from tests.engine.client import Client
from tests.tiny import save_dsa, save_llama, save_mla

MODELS = {"mla": (save_mla, 16), "dsa": (save_dsa, 64), "gqa": (save_llama, 16)}  # page size
AT_ONCE = 64
POOL_PAGES, HOST_RATIO = 96, 1.5
NUM_DOCUMENTS, DOCUMENT_PAGES = 80, 4
Asked = tuple[list[int], dict[str, Any]]


@dataclass
class Row:
    policy: str
    requests: int
    different: int
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int  # those that were loaded back
    cold_cached_tokens: int  # 0, or the comparison is worth nothing
    evicted_device_pages: int
    evicted_host_pages: int
    backups: int
    load_backs: int
    seconds: float


def draw(num: int, page_size: int, seed: int) -> Iterator[Asked]:
    """Deterministic."""
    rng = random.Random(seed)
    documents = [
        [rng.randrange(3, 199) for _ in range(DOCUMENT_PAGES * page_size)]
        for _ in range(NUM_DOCUMENTS)
    ]
    own_lengths = [1, page_size // 4, page_size + 6]
    for i in range(num):
        document = rng.choice(documents)
        own = [rng.randrange(3, 199) for _ in range(rng.choice(own_lengths))]
        sampling = {"max_tokens": rng.choice([1, 1, 1, 3]), "seed": i}
        sampling["temperature"] = rng.choice([0.0, 0.8])  # type: ignore[assignment]
        yield document[: rng.randint(1, len(document))] + own, sampling


def answer(client: Client, asked: list[Asked], **more: Any) -> None:
    """All of them, `AT_ONCE` unfinished ones at most."""
    waiting = list(enumerate(asked))[::-1]
    while waiting or client.engine.scheduler.load.num_running:
        load = client.engine.scheduler.load
        for _ in range(min(len(waiting), AT_ONCE - load.num_running - load.num_waiting)):
            number, (token_ids, sampling) = waiting.pop()
            client.submit(f"{number}", token_ids, **sampling, **more)
        client.step()
    client.run()


def ask_cold(model: Path, page_size: int, asked: list[Asked]) -> Client:
    cold = Client(
        model,
        page_size=page_size,
        max_total_tokens=page_size * 600,
        chunked_prefill_size=1024,
        max_running_requests=AT_ONCE,
    )
    answer(cold, asked, prompt_logprobs=0)
    cold.close()
    return cold


def compare(
    model: Path, page_size: int, policy: WritePolicy, asked: list[Asked], cold: Client, cp: int
) -> Row:
    began = time.perf_counter()
    tiered = Client(
        model,
        page_size=page_size,
        max_total_tokens=page_size * POOL_PAGES // cp,
        hicache=True,
        hicache_ratio=HOST_RATIO,
        hicache_write_policy=policy,
        chunked_prefill_size=8 * page_size + 11,
        max_running_requests=AT_ONCE,
        cp_size=cp,
    )
    answer(tiered, asked)
    counts = tiered.engine.scheduler.cache.counts
    tiered.engine.scheduler.cache.check()
    tiered.close()
    return Row(
        policy=policy,
        requests=len(asked),
        different=sum(tiered.tokens[rid] != tokens for rid, tokens in cold.tokens.items()),
        prompt_tokens=sum(len(token_ids) for token_ids, _ in asked),
        cached_tokens=sum(end.cached_tokens for end in tiered.ends.values()),
        host_tokens=sum(end.cached_host_tokens for end in tiered.ends.values()),
        cold_cached_tokens=sum(end.cached_tokens for end in cold.ends.values()),
        evicted_device_pages=counts["evicted_device_pages"],
        evicted_host_pages=counts["evicted_host_pages"],
        backups=counts["backups_finished"],
        load_backs=counts["load_backs_finished"],
        seconds=time.perf_counter() - began,
    )


def is_right(row: Row) -> bool:
    return (
        not row.different
        and not row.cold_cached_tokens
        and row.host_tokens > 0
        # What is backed up at its second use only may fit
        and (row.evicted_host_pages > 0 or row.policy == "write_through_selective")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", choices=MODELS, default="gqa")
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/host_tier_equality.json")
    )
    args = parser.parse_args()
    policies = get_args(WritePolicy)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        save, page_size = MODELS[args.model]
        model = save(Path(scratch))
        asked = list(draw(-(-args.requests // len(policies)), page_size, seed=1))
        cold = ask_cold(model, page_size, asked)
        print("cold", flush=True)
        for policy in policies:
            rows.append(compare(model, page_size, policy, asked, cold, args.cp))
            print(rows[-1], flush=True)
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    table = Table("", *(row.policy for row in rows))
    for name in list(asdict(rows[0]))[1:]:
        table.add_row(name, *(str(round(asdict(row)[name], 1)) for row in rows))
    Console(width=110, highlight=False).print(table)
    return 0 if all(map(is_right, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
