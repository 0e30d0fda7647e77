"""What the host tier does to the time to first token, through `plait serve` over HTTP.

    python -m benchmarks.host_tier_ttft [--cp 1 2] [--crowd 64] [--json FILE]

A small random DeepSeek-V3.2 model, a colocated worker of N ranks, KV for 28 pages in all, prompts
computed 128 tokens a step; once without a host tier and once with one of 56 pages.

- alone: three prompts of 16 pages, one at a time, then again, when the pool has forgotten them.
  Cold, from host memory, and once more at once, from the device.
- crowd: 192 requests, 64 at once, with the prefixes of 25 documents of 3 pages, some popular, most
  not: more than both tiers hold. Prefills in chunks and decodes share the batches, both
  tiers evict.

The gate comes first: every answer of the server with a host tier equals that of the one without.
Prints tables; exits with 1 where an answer differs or a hit is not reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from engine.pull.cache import default_model_path
from tests.served import Served, serving
from tests.tiny import save_dsa_chat

PAGE = 64
POOL_PAGES = 28
NUM_PROMPTS, PROMPT_PAGES = 3, 16
NUM_DOCUMENTS, DOCUMENT_PAGES = 25, 3
VOCABULARY = range(300, 20_000)
console = Console(width=130, highlight=False)


@dataclass(frozen=True)
class Told:
    text: str
    ttft_s: float
    device: int  # cached tokens, by tier
    host: int


def tokens(num: int, seed: str) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(VOCABULARY) for _ in range(num)]


async def ask(http: httpx.AsyncClient, token_ids: list[int], max_tokens: int) -> Told:
    """The time to the first chunk, which the first token brings."""
    body: dict[str, Any] = {"model": "tiny", "prompt": token_ids, "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    pieces: list[str] = []
    first_s = 0.0
    by_tier: dict[str, int] = {}
    began = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or time.perf_counter() - began
            chunk = json.loads(line[6:])
            pieces += [choice["text"] for choice in chunk["choices"]]
            if chunk["usage"] is not None:
                by_tier = chunk["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return Told("".join(pieces), first_s, by_tier["device"], by_tier["host"])


async def alone(http: httpx.AsyncClient) -> dict[str, list[Told]]:
    prompts = [tokens(PROMPT_PAGES * PAGE + 9, f"prompt {i}") for i in range(NUM_PROMPTS)]
    await ask(http, tokens(200, "warm up"), 4)
    found: dict[str, list[Told]] = {"first": [], "again": [], "at once": []}
    for token_ids in prompts:
        found["first"].append(await ask(http, token_ids, 4))
    for token_ids in prompts:
        found["again"].append(await ask(http, token_ids, 4))
        found["at once"].append(await ask(http, token_ids, 4))
    return found


async def crowd(http: httpx.AsyncClient, num: int, at_once: int) -> list[Told]:
    rng = random.Random(5)
    documents = [tokens(DOCUMENT_PAGES * PAGE, f"document {i}") for i in range(NUM_DOCUMENTS)]
    room = asyncio.Semaphore(at_once)

    asked: list[tuple[list[int], int]] = []
    for number in range(num):
        document = documents[min(int(rng.expovariate(0.15)), NUM_DOCUMENTS - 1)]
        own = tokens(rng.choice([3, 40, 90]), f"own {number}")
        asked.append((document + own, rng.choice([2, 6, 12])))

    async def one(token_ids: list[int], max_tokens: int) -> Told:
        async with room:
            return await ask(http, token_ids, max_tokens)

    return list(await asyncio.gather(*(one(*each) for each in asked)))


async def both(served: Served, at_once: int) -> tuple[dict[str, list[Told]], list[Told]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=1800, limits=limits) as http:
        return await alone(http), await crowd(http, 3 * at_once, at_once)


def measure(model: Path, cp: int, at_once: int, has_tier: bool) -> dict[str, Any]:
    flags = ["--colocated", "--prefill-cp-size", str(cp), "--chunked-prefill-size", "128"]
    flags += ["--max-total-tokens", str(POOL_PAGES * PAGE // cp)]
    flags += ["--enable-hierarchical-cache"] if has_tier else []
    with serving(model, *flags) as served:
        served.wait_ready()
        began = time.perf_counter()
        one_by_one, together = asyncio.run(both(served, at_once))
        seconds = time.perf_counter() - began
        seen = served.metrics()
        counts = {}
        if has_tier:
            served.until(lambda: served.metrics()("plait_host_copies") == 0)
            seen = served.metrics()
            counts = {
                "host_evicted_pages": seen("plait_evicted_pages_total", 'tier="host"'),
                "device_evicted_pages": seen("plait_evicted_pages_total", 'tier="device"'),
                "host_hit_tokens": seen("plait_host_hit_tokens_total"),
                "load_back_wait_s": seen("plait_load_back_wait_seconds_total"),
            }
        served.stop()
    return {"alone": one_by_one, "crowd": together, "counts": counts, "seconds": seconds}


def texts(found: dict[str, Any]) -> list[str]:
    told = [answer for answers in found["alone"].values() for answer in answers] + found["crowd"]
    return [answer.text for answer in told]


def median_ms(told: list[Told]) -> float:
    return 1e3 * statistics.median(answer.ttft_s for answer in told)


def row_of(cp: int, without: dict[str, Any], tier: dict[str, Any]) -> dict[str, Any]:
    again = tier["alone"]["again"]
    num_prompt = NUM_PROMPTS * PROMPT_PAGES * PAGE
    cold, from_host = median_ms(tier["alone"]["first"]), median_ms(again)
    return {
        "ranks": cp,
        "answers": len(texts(tier)),
        "different": sum(a != b for a, b in zip(texts(without), texts(tier), strict=True)),
        "cold_ms": cold,
        "host_ms": from_host,
        "device_ms": median_ms(tier["alone"]["at once"]),
        "again_without_tier_ms": median_ms(without["alone"]["again"]),
        "cold_over_host": cold / from_host,
        "again_from_host": sum(answer.host for answer in again) / num_prompt,
        "crowd_ms": median_ms(tier["crowd"]),
        "crowd_without_tier_ms": median_ms(without["crowd"]),
        "crowd_ratio": median_ms(without["crowd"]) / median_ms(tier["crowd"]),
        "crowd_host_tokens": sum(answer.host for answer in tier["crowd"]),
        **tier["counts"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--crowd", type=int, default=64)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/host_tier_ttft.json"))
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = save_dsa_chat(Path(scratch) / "tiny", default_model_path())
        for cp in args.cp:
            without, tier = (measure(model, cp, args.crowd, has) for has in (False, True))
            rows.append(row_of(cp, without, tier))
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table("", *(f"N = {row['ranks']}" for row in rows))
    for name in rows[0]:
        cells = [row[name] for row in rows]
        table.add_row(name, *(f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells))
    console.print(table)
    is_right = all(not row["different"] and row["again_from_host"] > 0.5 for row in rows)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
