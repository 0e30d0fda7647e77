"""What the prefix-aware router costs the event loop: 16 workers with 100k cached pages each, a
prompt of 128k tokens, and a reader thread that applies the workers' events meanwhile.

    python -m benchmarks.router [--rounds 5] [--rest 0] [--json FILE]

Prints five tables. Exits with 1, and reports nothing, where the index does not say what a plain
search over sets says. Pauses are gaps between two turns of an asyncio loop that does nothing but
turn; those with no thread beside it show what the machine itself adds. The longest pause of each
round is reported as that of the quietest, the median and the worst round: on a machine that others
use too, all but the first measure the others. There, `chrt -f 1` before the command and `--rest 1`
keep them away from the cores during a round and let them go on between two.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvcache.events import KVEvents
from server.router.policy import POLICIES, Candidate
from server.router.prefix_index import PrefixIndex
from server.router.prompt_hashes import prompt_hashes

PAGE = 64
PROMPT_TOKENS = 131_072
PROMPT_PAGES = PROMPT_TOKENS // PAGE
NUM_WORKERS = 16
PAGES_PER_WORKER = 100_000
SNAPSHOT_HASHES = 1024
STEP_PAGES = 128  # stored and removed by one step: a chunk of 8192 tokens
SWITCH_INTERVALS_S = (0.005, 0.0005)  # CPython's default, and a tenth of it
KEYS = [f"worker-{i:02d}" for i in range(NUM_WORKERS)]

Row = dict[str, object]


def prompts_of(seed: int) -> list[list[bytes]]:
    """What one worker caches: prompts of up to 128k tokens, together PAGES_PER_WORKER pages."""
    chance = random.Random(seed)
    prompts, num_pages = [], 0
    while num_pages < PAGES_PER_WORKER:
        length = min(chance.randint(1, PROMPT_PAGES), PAGES_PER_WORKER - num_pages)
        prompts.append([chance.randbytes(16) for _ in range(length)])
        num_pages += length
    return prompts


def snapshot(prompts: list[list[bytes]]) -> list[KVEvents]:
    pages = list(itertools.chain(*prompts))
    return [
        KVEvents(b"".join(pages[i : i + SNAPSHOT_HASHES]), reset=i == 0)
        for i in range(0, len(pages), SNAPSHOT_HASHES)
    ]


def candidates(matched: dict[str, int]) -> list[Candidate]:
    return [
        Candidate(
            key=key,
            role="colocated",
            num_live=i % 5,
            live_tokens=1000 * (i % 3),
            waiting_tokens=0,
            num_running=i % 4,
            free_pages=PAGES_PER_WORKER,
            total_pages=PAGES_PER_WORKER,
            page_size=PAGE,
            matched_pages=matched[key],
            is_overloaded=False,
        )
        for i, key in enumerate(KEYS)
    ]


def choose(index: PrefixIndex, hashes: list[bytes], policy: str, turn: int) -> str | None:
    """All that the event loop does for one request once its pages have names."""
    return POLICIES[policy](candidates(index.matched(hashes, KEYS)), PROMPT_TOKENS, turn)


def asked_prompts(held: dict[str, list[list[bytes]]]) -> list[list[bytes]]:
    """128k-token prompts: unknown, known in part to one worker, known up to their last page."""
    chance = random.Random(99)
    fresh = [chance.randbytes(16) for _ in range(PROMPT_PAGES)]
    asked = [fresh]
    for key in KEYS:
        longest = max(held[key], key=len)
        asked.append((longest + fresh)[:PROMPT_PAGES])
        asked.append((longest[: len(longest) // 3] + fresh)[:PROMPT_PAGES])
    return asked


def is_right(
    index: PrefixIndex, held: dict[str, list[list[bytes]]], asked: list[list[bytes]]
) -> bool:
    """Against a plain search. In these trees no prompt is the beginning of another."""
    sets = {key: set(itertools.chain(*prompts)) for key, prompts in held.items()}
    for hashes in asked:
        leading = {
            key: len(list(itertools.takewhile(pages.__contains__, hashes)))
            for key, pages in sets.items()
        }
        if index.matched(hashes, KEYS) != leading:
            return False
    return all(index.num_pages(key) == PAGES_PER_WORKER for key in KEYS)


def spread(times_s: list[float]) -> Row:
    ordered = sorted(1e3 * t for t in times_s)
    return {
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[int(0.99 * len(ordered))],
        "max_ms": ordered[-1],
    }


def choosing(index: PrefixIndex, asked: list[list[bytes]], num_calls: int) -> list[Row]:
    rows: list[Row] = []
    for policy in POLICIES:
        times_s = []
        for turn in range(num_calls):
            start = time.perf_counter()
            choose(index, asked[turn % len(asked)], policy, turn)
            times_s.append(time.perf_counter() - start)
        rows.append({"policy": policy, "calls": num_calls, **spread(times_s)})
    return rows


class Work:
    """What the threads beside the loop do; each is called again and again until the round ends."""

    def __init__(self, index: PrefixIndex, held: dict[str, list[list[bytes]]]) -> None:
        self._index = index
        self._snapshots = {key: snapshot(prompts) for key, prompts in held.items()}
        self._tokens = [i * i % 128_000 for i in range(PROMPT_TOKENS)]
        self._joins = itertools.cycle(KEYS)
        pages = [random.Random(7).randbytes(16 * STEP_PAGES) for _ in range(2 * NUM_WORKERS)]
        first = [KVEvents(stored=page) for page in pages[:NUM_WORKERS]]
        pairs = list(zip(pages[:NUM_WORKERS], pages[NUM_WORKERS:], strict=True))
        there = [KVEvents(stored=new, removed=old) for old, new in pairs]
        back = [KVEvents(stored=old, removed=new) for old, new in pairs]
        self._steps: Iterator[list[KVEvents]] = itertools.chain(
            [first], itertools.cycle([there, back])
        )

    def steps(self) -> None:
        """One step of every worker."""
        for key, events in zip(KEYS, next(self._steps), strict=True):
            self._index.apply(key, events)

    def join(self) -> None:
        """A worker is dropped and comes back with all it holds."""
        key = next(self._joins)
        self._index.drop(key)
        self._index.add(key, PAGES_PER_WORKER + 2 * STEP_PAGES)
        for part in self._snapshots[key]:
            self._index.apply(key, part)

    def hash_prompt(self) -> None:
        prompt_hashes(self._tokens, PAGE, b"salt")


def pauses(work: list[Callable[[], None]], seconds: float) -> tuple[list[float], list[int]]:
    """Gaps between the turns of a loop, and how often each piece of work was done meanwhile."""
    gaps_s: list[float] = []
    done = [0] * len(work)
    is_over = threading.Event()

    def run(place: int) -> None:
        while not is_over.is_set():
            work[place]()
            done[place] += 1

    async def turn() -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        until = last = time.perf_counter()
        until += seconds

        def tick() -> None:
            nonlocal last
            now = time.perf_counter()
            gaps_s.append(now - last)
            last = now
            if now < until:
                loop.call_soon(tick)
            else:
                ended.set_result(None)

        loop.call_soon(tick)
        await ended

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(work))]
    for thread in threads:
        thread.start()
    try:
        asyncio.run(turn())
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    return gaps_s, done


def pausing(work: Work, rounds: int, seconds: float, rest_s: float) -> list[Row]:
    cases: dict[str, list[Callable[[], None]]] = {
        "nothing": [],
        "steps of 16 workers": [work.steps],
        "workers that join": [work.join],
        "hashing of prompts": [work.hash_prompt],
        "joins and hashing": [work.join, work.hash_prompt],
    }
    rows: list[Row] = []
    before = sys.getswitchinterval()
    for (name, threads), interval_s in itertools.product(cases.items(), SWITCH_INTERVALS_S):
        sys.setswitchinterval(interval_s)
        longest, gaps_s, done = [], [], 0
        for _ in range(rounds):
            time.sleep(rest_s)
            found, counts = pauses(threads, seconds)
            gaps_s += found
            longest.append(1e3 * max(found))
            done += sum(counts)
        rows.append(
            {
                "beside the loop": name,
                "switch_interval_ms": 1e3 * interval_s,
                "p99_ms": spread(gaps_s)["p99_ms"],
                "longest_ms_quietest": min(longest),
                "longest_ms_median": statistics.median(longest),
                "longest_ms_worst": max(longest),
                "done_per_s": done / (rounds * seconds),
            }
        )
    sys.setswitchinterval(before)
    return rows


def single(work: Work) -> list[Row]:
    """Each alone in the process, the best of nine."""
    rows: list[Row] = []
    for name, call, pages in [
        ("apply a step of each worker", work.steps, 2 * STEP_PAGES * NUM_WORKERS),
        ("a worker that joins", work.join, PAGES_PER_WORKER),
        ("hash a prompt of 128k tokens", work.hash_prompt, PROMPT_PAGES),
    ]:
        times_s = []
        for _ in range(9):
            start = time.perf_counter()
            call()
            times_s.append(time.perf_counter() - start)
        best = min(times_s)
        rows.append(
            {"work": name, "pages": pages, "ms": 1e3 * best, "us_a_page": 1e6 * best / pages}
        )
    return rows


def machine() -> Row:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "real_time": os.sched_getscheduler(0) == os.SCHED_FIFO,
    }


def show(title: str, rows: list[Row]) -> None:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(
            *(
                f"{v:.3g}" if isinstance(v, float) else f"{v:,}" if type(v) is int else str(v)
                for v in row.values()
            )
        )
    Console(width=150, highlight=False).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds before each round")
    parser.add_argument("--calls", type=int, default=2000, help="of choose, per policy")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    held = {key: prompts_of(i) for i, key in enumerate(KEYS)}
    parts = {key: snapshot(held[key]) for key in KEYS}
    index = PrefixIndex()
    rss_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in KEYS:
        index.add(key, PAGES_PER_WORKER)
        for part in parts[key]:
            index.apply(key, part)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_before)
    index_pages = sum(index.num_pages(key) for key in KEYS)
    asked = asked_prompts(held)
    if not is_right(index, held, asked):
        print("the index and a plain search differ", file=sys.stderr)
        return 1
    work = Work(index, held)
    found: dict[str, list[Row]] = {
        "machine": [machine()],
        "choose": choosing(index, asked, args.calls),
        "single": single(work),
        "memory": [
            {
                "workers": NUM_WORKERS,
                "pages": index_pages,
                "mebibytes": grown / 2**20,
                "bytes_a_page": grown / index_pages,
            }
        ],
        "pauses": pausing(work, args.rounds, args.seconds, args.rest),
    }
    for name, rows in found.items():
        show(name, rows)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
