"""What a step costs the leader as the cache over two tiers grows: 100 to 100,000 nodes.

    python -m benchmarks.host_tier_nodes [--steps 2000] [--json FILE] [--plot FILE]

A node is one turn of a conversation, of two pages. The tiers are full all the time: a third of the
nodes lie on the device too, the rest on the host only. A step is what one request asks: match a
conversation, load back what the host has of it, take pages for a turn (which evicts as many),
insert it, back it up (which evicts on the host). An eviction is of two pages from the device.
Microseconds of the thread's CPU time. The gate comes first: all accounts of the cache must agree
before and after. Prints a table; exits with 1 where the gate fails or a step at the most nodes
takes more than twice what it takes at the fewest.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvcache.allocator import CPSharedPagedAllocator
from kvcache.prefix_cache import LoadedBack
from kvcache.tiered_cache import TieredCache

PAGE, TURN_PAGES, TURNS = 16, 2, 5
SIZES = (100, 1_000, 10_000, 100_000)
NUM_RANKS = 4
MOST_GROWTH = 2.0


@dataclass
class Row:
    nodes: int
    nodes_on_device: int
    step_us_median: float
    step_us_p99: float
    evict_us_median: float
    evict_us_p99: float
    load_backs: int


class Conversations:
    """Requests over a cache whose tiers are full."""

    def __init__(self, num_nodes: int) -> None:
        per_lane = num_nodes * TURN_PAGES // NUM_RANKS
        self.cache = TieredCache(
            CPSharedPagedAllocator(max(per_lane // 3, 2 * TURNS), PAGE, NUM_RANKS),
            CPSharedPagedAllocator(per_lane, PAGE, NUM_RANKS),
        )
        self._rng = random.Random(num_nodes)
        self._seeds = list(range(num_nodes // TURNS))
        self._next_seed = len(self._seeds)
        for seed in self._seeds:
            for turns in range(1, TURNS + 1):
                self.ask(self._tokens(seed, turns))

    def _tokens(self, seed: int, turns: int) -> list[int]:
        return random.Random(seed).choices(range(50_000), k=turns * TURN_PAGES * PAGE)

    def draw(self) -> list[int]:
        """A known conversation, or a new one in place of an old."""
        at = self._rng.randrange(len(self._seeds))
        if self._rng.random() < 0.3:
            self._seeds[at], self._next_seed = self._next_seed, self._next_seed + 1
        return self._tokens(self._seeds[at], self._rng.randint(1, TURNS))

    def ask(self, token_ids: list[int]) -> None:
        cache = self.cache
        match = cache.match(token_ids)
        if match.num_host_tokens:
            found = cache.load_back(match, mem_quota=cache.mem_quota(0))
            if isinstance(found, LoadedBack):
                match = found.match
        cache.lock(match.node)
        num_new = len(token_ids) // PAGE - len(match.pages)
        new = cache.device.alloc(num_new, match.pages[-1] if match.pages else None)
        if new is None:
            raise RuntimeError(f"no pages: {cache.device.state_str()}")
        cache.use(match)
        inserted = cache.insert(token_ids, match.pages + new)
        cache.device.free(inserted.duplicates)
        cache.unlock(match.node)
        orders = cache.take_orders()
        for item in (*orders.load_backs, *orders.backups):
            for rank in range(NUM_RANKS):
                cache.acknowledge(item.id, rank)


def measure(num_nodes: int, num_steps: int) -> Row:
    conversations = Conversations(num_nodes)
    cache = conversations.cache
    for _ in range(num_steps // 4):
        conversations.ask(conversations.draw())
    cache.check()
    before = cache.counts["load_backs_finished"]
    steps, evictions = [], []
    for _ in range(num_steps):
        token_ids = conversations.draw()
        begin = time.thread_time()
        conversations.ask(token_ids)
        steps.append(1e6 * (time.thread_time() - begin))
        begin = time.thread_time()
        cache.device.evict(TURN_PAGES)
        evictions.append(1e6 * (time.thread_time() - begin))
    cache.check()
    tree = cache._tree
    return Row(
        nodes=tree.num_nodes,
        nodes_on_device=sum(bool(node.pages) for node in tree.nodes()),
        step_us_median=statistics.median(steps),
        step_us_p99=statistics.quantiles(steps, n=100)[98],
        evict_us_median=statistics.median(evictions),
        evict_us_p99=statistics.quantiles(evictions, n=100)[98],
        load_backs=cache.counts["load_backs_finished"] - before,
    )


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in ("step_us_median", "step_us_p99", "evict_us_median", "evict_us_p99"):
        axes.loglog(SIZES[: len(rows)], [getattr(row, name) for row in rows], "o-", label=name)
    axes.set(xlabel="nodes", ylabel="microseconds", ylim=(1, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/host_tier_nodes.json")
    )
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows = [measure(num_nodes, args.steps) for num_nodes in SIZES]
    table = Table(*asdict(rows[0]), title="the leader's cost of one request's step")
    for row in rows:
        table.add_row(
            *(f"{v:.1f}" if isinstance(v, float) else str(v) for v in asdict(row).values())
        )
    Console(width=120, highlight=False).print(table)
    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if args.plot is not None:
        plot(rows, args.plot)
    return 0 if rows[-1].step_us_median <= MOST_GROWTH * rows[0].step_us_median else 1


if __name__ == "__main__":
    sys.exit(main())
