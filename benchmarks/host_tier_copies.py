"""The host tier's copies on a GPU against the machine's pinned-copy ceiling, in one run.

    python -m benchmarks.host_tier_copies [--pages 256] [--rounds 7] [--json FILE]

DeepSeek-V3.2's page of 64 tokens over 61 layers (5.5 MB). The gate comes first: scattered pages
must come back as they were. Then backup and load-back of contiguous and of scattered pages, and
how much of a load-back hides under bf16 matrix products: (compute alone + load alone - both) / load
alone. Prints a table and exits with 1 where the gate fails or scattered pages move at less than 0.9
of the ceiling.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvcache.host_plan import Backup, HostItem, LoadBack
from kvcache.host_tier import HostTier
from kvcache.layout import KVGeometry
from kvcache.pool import KVPool

PAGE = 64
GEOMETRY = KVGeometry(num_layers=61, latent_dim=576, index_dim=128, index_layers=tuple(range(61)))
LEAST_SHARE = 0.9
CEILING_BYTES = 256 * 2**20


@dataclass
class Row:
    direction: str
    pages: str
    num_pages: int
    gb_s: float
    ceiling_gb_s: float
    share: float


def seconds_of(work: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


class Bench:
    def __init__(self, num_pages: int, rounds: int) -> None:
        self.num_pages, self.rounds = num_pages, rounds
        self.pool = KVPool.create(GEOMETRY, PAGE, num_pages, torch.bfloat16, "cuda")
        for buffer in self.pool.buffers():
            buffer.view(torch.int16).random_()
        self.tier = HostTier(self.pool, num_pages)
        self.in_order = list(range(1, num_pages + 1))
        self.shuffled = random.Random(0).sample(self.in_order, num_pages)
        self._next_id = 0

    def check(self) -> None:
        """RuntimeError unless what went out scattered comes back the same."""
        before = [buffer.clone() for buffer in self.pool.buffers()]
        self.copy("backup", self.in_order, self.shuffled)
        for buffer in self.pool.buffers():
            buffer[:, PAGE:].fill_(torch.nan)
        self.copy("load_back", self.in_order, self.shuffled)
        same = (
            torch.equal(a.view(torch.int16), b.view(torch.int16))
            for a, b in zip(before, self.pool.buffers(), strict=True)
        )
        if not all(same):
            raise RuntimeError("the gate failed: what came back is not what went out")

    def item(self, direction: str, device: list[int], host: list[int]) -> HostItem:
        self._next_id += 1
        kind = Backup if direction == "backup" else LoadBack
        return kind(id=self._next_id, device_pages=device, host_pages=host)

    def copy(self, direction: str, device: list[int], host: list[int]) -> float:
        """GB/s of one item."""
        before = self.tier.seconds[direction]
        self.tier.start(self.item(direction, device, host))
        torch.cuda.synchronize()
        if not self.tier.poll():
            raise RuntimeError("a copy that has ended was not acknowledged")
        return len(device) * self.tier.page_bytes / (self.tier.seconds[direction] - before) / 1e9

    def ceiling(self, direction: str) -> float:
        host = torch.empty(CEILING_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(CEILING_BYTES, dtype=torch.uint8, device="cuda")
        target, source = (host, device) if direction == "backup" else (device, host)
        times = [
            seconds_of(lambda: [target.copy_(source, non_blocking=True) for _ in range(4)] and None)
            for _ in range(self.rounds + 1)
        ]
        return 4 * CEILING_BYTES / statistics.median(times[1:]) / 1e9

    def rows(self) -> list[Row]:
        found = []
        for direction in ("backup", "load_back"):
            ceiling = self.ceiling(direction)
            few = self.num_pages // 8
            for name, device, host in (
                ("contiguous", self.in_order, self.in_order),
                ("scattered", self.in_order, self.shuffled),
                ("scattered", self.in_order[:few], self.shuffled[:few]),
            ):
                rates = [self.copy(direction, device, host) for _ in range(self.rounds)]
                rate = statistics.median(rates)
                found.append(Row(direction, name, len(device), rate, ceiling, rate / ceiling))
        return found

    def hidden(self) -> dict[str, float]:
        """Of a load-back under matrix products that take about as long, layer after layer."""
        a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        product = torch.empty_like(a)
        item_bytes = self.num_pages * self.tier.page_bytes
        each = statistics.median(seconds_of(lambda: torch.mm(a, a, out=product)) for _ in range(5))
        a_layer = max(1, round(item_bytes / 50e9 / each / GEOMETRY.num_layers))

        def compute(waits: bool) -> None:
            for layer in range(GEOMETRY.num_layers):
                if waits:
                    self.tier.wait_layer(layer)
                for _ in range(a_layer):
                    torch.mm(a, a, out=product)

        def both() -> None:
            self.tier.start(self.item("load_back", self.in_order, self.shuffled))
            compute(True)

        alone, together = [], []
        for _ in range(self.rounds):
            alone.append(seconds_of(lambda: compute(False)))
            together.append(seconds_of(both))
            self.tier.poll()
        load = item_bytes / self.copy("load_back", self.in_order, self.shuffled) / 1e9
        compute_s, both_s = statistics.median(alone), statistics.median(together)
        return {
            "compute_ms": 1e3 * compute_s,
            "load_back_ms": 1e3 * load,
            "both_ms": 1e3 * both_s,
            "hidden_share": (compute_s + load - both_s) / load,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/host_tier_copies.json")
    )
    args = parser.parse_args()
    bench = Bench(args.pages, args.rounds)
    bench.check()
    rows, hidden = bench.rows(), bench.hidden()
    table = Table(*asdict(rows[0]), title=torch.cuda.get_device_name())
    for row in rows:
        table.add_row(
            *(f"{v:.3f}" if isinstance(v, float) else str(v) for v in asdict(row).values())
        )
    console = Console(width=120, highlight=False)
    console.print(table)
    console.print(hidden)
    result = {
        "device": torch.cuda.get_device_name(),
        "page_bytes": bench.tier.page_bytes,
        "copies": [asdict(row) for row in rows],
        "under_compute": hidden,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    scattered = [row for row in rows if row.pages == "scattered" and row.num_pages == args.pages]
    return 0 if all(row.share >= LEAST_SHARE for row in scattered) else 1


if __name__ == "__main__":
    sys.exit(main())
