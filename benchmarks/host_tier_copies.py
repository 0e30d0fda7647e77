"""The host tier's copies on a GPU against the machine's pinned-copy ceiling, in one run.

    python -m benchmarks.host_tier_copies [--sweep] [--contexts 32768 131072] [--json FILE]

DeepSeek-V3.2's page of 64 tokens over 61 layers (5.5 MB), and one of a single layer's latent rows
(73,728 bytes). The gate comes first: scattered pages must come back as they were. Then

- backup and load-back of contiguous and of scattered pages;
- what a copy costs the matrix products that run beside it;
- how much of a load-back hides under a prefill of the tokens that follow: the matrix products of
  DeepSeek-V3.2's layers in bf16 at their real shapes, with an attention that costs nothing, which
  is the hardest case. (compute alone + load alone - both) / load alone; a load-back that takes
  longer than the compute can hide no more than compute / load.

Prints tables, writes the JSON after each part, and exits with 1 where the gate fails or scattered
pages move at less than 0.9 of the ceiling.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kernels.gpu.copy_pages import SHAPE, Shape, copy_pages
from kvcache.host_plan import Backup, HostItem, LoadBack
from kvcache.host_tier import HostTier
from kvcache.layout import KVGeometry
from kvcache.pool import KVPool

PAGE = 64
NUM_LAYERS = 61
GEOMETRIES = {
    "61 layers, latent and index keys": KVGeometry(
        num_layers=NUM_LAYERS,
        latent_dim=576,
        index_dim=128,
        index_layers=tuple(range(NUM_LAYERS)),
    ),
    "one layer's latent rows": KVGeometry(num_layers=1, latent_dim=576),
}
LEAST_SHARE = 0.9
CEILING_BYTES = 256 * 2**20
NEW_TOKENS = (256, 1024, 2048, 8192)
SWEEP = [
    Shape(num_programs, block_bytes, num_warps)
    for block_bytes, num_warps in ((131072, 32), (65536, 32), (32768, 16), (32768, 8), (16384, 8))
    for num_programs in (3, 4, 6, 8, 12, 16, 32)
]
BESIDE = [Shape(4, 131072, 32), Shape(4, 65536, 32), Shape(6, 32768, 8), SHAPE, Shape(16, 16384, 8)]
RATES = ("backup", "load_back")
# [in, out] of a layer's projections; the experts as the 9 that each token goes through.
PROJECTIONS = (
    (7168, 1536 + 576),
    (1536, 128 * 192),
    (1536, 64 * 128),
    (7168, 128),
    (128 * 128, 7168),
    (7168, 2 * 9 * 2048),
    (9 * 2048, 7168),
)
console = Console(width=120, highlight=False)


def seconds_of(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def median_of(rounds: int, measure: Callable[[], float]) -> float:
    measure()
    return statistics.median(measure() for _ in range(rounds))


class Bench:
    def __init__(self, geometry: KVGeometry, num_pages: int, rounds: int) -> None:
        self.geometry, self.num_pages, self.rounds = geometry, num_pages, rounds
        self.pool = KVPool.create(geometry, PAGE, num_pages, torch.bfloat16, "cuda")
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

    def rows(self, page: str, ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
        few = self.num_pages // 8
        for direction, ceiling in ceilings.items():
            for name, device, host in (
                ("contiguous", self.in_order, self.in_order),
                ("scattered", self.in_order, self.shuffled),
                ("scattered", self.in_order[:few], self.shuffled[:few]),
            ):

                def once(direction=direction, device=device, host=host) -> float:
                    return self.copy(direction, device, host)

                rate = median_of(self.rounds, once)
                yield {
                    "page": page,
                    "page_bytes": self.tier.page_bytes,
                    "direction": direction,
                    "order": name,
                    "num_pages": len(device),
                    "gb_s": rate,
                    "ceiling_gb_s": ceiling,
                    "share": rate / ceiling,
                }


def measure_ceilings(rounds: int) -> dict[str, float]:
    """GB/s of one long copy from or to pinned memory, by direction."""
    host = torch.empty(CEILING_BYTES, dtype=torch.uint8, pin_memory=True).random_()
    device = torch.empty(CEILING_BYTES, dtype=torch.uint8, device="cuda").random_()

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def four() -> None:
            for _ in range(4):
                target.copy_(source, non_blocking=True)

        return 4 * CEILING_BYTES / median_of(rounds, lambda: seconds_of(four)) / 1e9

    return {"backup": rate(host, device), "load_back": rate(device, host)}


class Scattered:
    """2048 pages of 73,728 bytes each, for the kernel alone."""

    num_pages = 2048
    num_bytes = num_pages * 73728

    def __init__(self) -> None:
        shape = (1, self.num_pages, 73728 // 8)
        generator = torch.Generator().manual_seed(0)
        self.device = torch.randint(0, 2**60, shape, device="cuda")
        self.host = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        self.host.copy_(self.device)
        self.here = torch.arange(self.num_pages, device="cuda")
        self.there = torch.randperm(self.num_pages, generator=generator).cuda()

    def copy(self, direction: str, shape: Shape) -> None:
        if direction == "backup":
            copy_pages(self.host, self.there, self.device, self.here, shape)
        else:
            copy_pages(self.device, self.here, self.host, self.there, shape)


def sweep(pages: Scattered, ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
    for shape in SWEEP:
        found = {}
        for direction, ceiling in ceilings.items():

            def once(direction=direction, shape=shape) -> float:
                return seconds_of(lambda: pages.copy(direction, shape))

            found[direction] = pages.num_bytes / median_of(3, once) / 1e9 / ceiling
        yield {
            "programs": shape.num_programs,
            "block_bytes": shape.block_bytes,
            "warps": shape.num_warps,
            "backup_share": found["backup"],
            "load_back_share": found["load_back"],
        }


def beside_products(pages: Scattered, bench: Bench) -> Iterator[dict[str, Any]]:
    """What a matrix product loses while a copy runs on another stream, and how fast that is: for
    the load-back's kernel in some shapes, then for the tier's own copies."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(a)
    stream = torch.cuda.Stream()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def products() -> None:
        for _ in range(30):
            torch.mm(a, a, out=product)

    def by_kernel(direction: str, shape: Shape) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ends[0].record()
            for _ in range(20):
                pages.copy(direction, shape)
            ends[1].record()

    def by_tier(direction: str) -> None:
        bench.tier.start(bench.item(direction, bench.in_order, bench.shuffled))

    cases: list[tuple[str, str, Callable[[], None]]] = [
        ("load_back", str(shape), partial(by_kernel, "load_back", shape)) for shape in BESIDE
    ]
    cases.append(("backup", f"kernel, {SHAPE}", partial(by_kernel, "backup", SHAPE)))
    cases += [(direction, "the tier", partial(by_tier, direction)) for direction in RATES]
    for direction, how, start in cases:
        alone, together, rates = [], [], []
        for _ in range(4):
            alone.append(seconds_of(products))
            before = bench.tier.seconds[direction]

            def both(start=start) -> None:
                start()
                products()

            together.append(seconds_of(both))
            if bench.tier.poll():
                num_bytes = bench.num_pages * bench.tier.page_bytes
                rates.append(num_bytes / (bench.tier.seconds[direction] - before) / 1e9)
            else:
                copy_s = ends[0].elapsed_time(ends[1]) / 1e3
                rates.append(20 * pages.num_bytes / copy_s / 1e9)
        yield {
            "direction": direction,
            "how": how.replace("num_", "").replace("Shape", ""),
            "product_slower_by": statistics.median(together) / statistics.median(alone) - 1,
            "products_ms": 1e3 * statistics.median(alone),
            "copy_gb_s": statistics.median(rates),
        }


class Prefill:
    """The matrix products of `num_tokens` tokens in each of DeepSeek-V3.2's layers."""

    def __init__(self, num_tokens: int) -> None:
        self._inputs = [
            torch.randn(num_tokens, n, dtype=torch.bfloat16, device="cuda") for n, _ in PROJECTIONS
        ]
        self._weights = [
            torch.randn(n, m, dtype=torch.bfloat16, device="cuda") for n, m in PROJECTIONS
        ]
        self._outputs = [
            torch.empty(num_tokens, m, dtype=torch.bfloat16, device="cuda") for _, m in PROJECTIONS
        ]

    def run(self, before_layer: Callable[[int], object]) -> None:
        for layer in range(NUM_LAYERS):
            before_layer(layer)
            for a, b, out in zip(self._inputs, self._weights, self._outputs, strict=True):
                torch.mm(a, b, out=out)


def under_prefill(bench: Bench, context: int) -> Iterator[dict[str, Any]]:
    device, host = (pages[: context // PAGE] for pages in (bench.in_order, bench.shuffled))
    num_bytes = len(device) * bench.tier.page_bytes
    load = num_bytes / median_of(3, lambda: bench.copy("load_back", device, host)) / 1e9
    for num_tokens in NEW_TOKENS:
        prefill = Prefill(num_tokens)
        starting: list[float] = []

        def both(prefill=prefill, starting=starting) -> None:
            began = time.perf_counter()
            bench.tier.start(bench.item("load_back", device, host))
            starting.append(time.perf_counter() - began)
            prefill.run(bench.tier.wait_layer)

        def together(both=both) -> float:
            seconds = seconds_of(both)
            bench.tier.poll()
            return seconds

        def by_itself(prefill=prefill) -> float:
            return seconds_of(lambda: prefill.run(lambda layer: None))

        compute, both_s = median_of(3, by_itself), median_of(3, together)
        yield {
            "context": context,
            "new_tokens": num_tokens,
            "compute_ms": 1e3 * compute,
            "load_back_ms": 1e3 * load,
            "both_ms": 1e3 * both_s,
            "hidden_share": (compute + load - both_s) / load,
            "at_most": min(1.0, compute / load),
            "starting_ms": 1e3 * statistics.median(starting),
        }


class Report:
    """Prints each part as it ends and keeps the file up to date."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.parts: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "shape": repr(SHAPE),
        }

    def add(self, name: str, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        began = time.perf_counter()
        found = list(rows)
        table = Table(*found[0], title=name)
        for row in found:
            table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table)
        console.print(f"{name}: {time.perf_counter() - began:.1f} s")
        self.parts.setdefault(name, []).extend(found)
        self._path.write_text(json.dumps(self.parts, indent=1) + "\n")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="other shapes of the kernel, too")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/host_tier_copies.json")
    )
    args = parser.parse_args()
    report = Report(args.json)
    ceilings = measure_ceilings(args.rounds)
    report.parts["ceilings_gb_s"] = ceilings
    slow = []
    bench = None
    for page, geometry in reversed(GEOMETRIES.items()):
        num_pages = 2048 if geometry.num_layers == 1 else min(args.contexts) // PAGE
        bench = Bench(geometry, num_pages, args.rounds)
        bench.check()
        rows = report.add("copies", bench.rows(page, ceilings))
        slow += [r for r in rows if r["order"] == "scattered" and r["share"] < LEAST_SHARE]
    scattered = Scattered()
    if args.sweep:
        report.add("sweep", sweep(scattered, ceilings))
    report.add("beside_products", beside_products(scattered, bench))
    for context in args.contexts:
        if context // PAGE > bench.num_pages:
            bench = None  # its memory first
            bench = Bench(GEOMETRIES["61 layers, latent and index keys"], context // PAGE, 1)
            bench.copy("backup", bench.in_order, bench.shuffled)
        report.add("under_prefill", under_prefill(bench, context))
    # Few pages of one layer take some tens of microseconds, which launching them does not hide.
    return 1 if any(r["num_pages"] * r["page_bytes"] > 1e8 for r in slow) else 0


if __name__ == "__main__":
    sys.exit(main())
