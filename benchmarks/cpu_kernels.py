"""Speed of the CPU kernels on this machine: a table, and JSON with --json PATH.

Each figure is the median of several rounds over enough weights to leave the caches, as in decoding.
Results are checked against float64 first; a wrong kernel gets no figures.

    python -m benchmarks.cpu_kernels --threads 2
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn import functional

from kernels.cpu import threads
from kernels.linear import cpu_kernels, linear, swiglu_mlp
from kernels.moe import moe, moe_reference

SHAPES = [(1536, 576), (576, 1536), (960, 576), (49152, 576), (2048, 2048)]
COLD_BYTES = 64 << 20  # weights rotated through, far above the last cache
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Row = dict[str, str | int | float]
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    threads.configure(options.threads)
    dtype = DTYPES[options.dtype]
    check(dtype)
    print(f"{'what':<22}{'rows':>6}{'us':>10}{'GB/s':>8}{'GFLOP/s':>9}{'torch fp32 us':>15}")
    table = []
    for num_rows in options.rows:
        for row in measure(num_rows, dtype, options.rounds):
            table.append(row)
            torch_us = f"{row['torch_fp32_us']:.0f}" if "torch_fp32_us" in row else ""
            print(
                f"{row['what']:<22}{num_rows:>6}{row['us']:>10.0f}{row['gb_per_s']:>8.1f}"
                f"{row['gflop_per_s']:>9.1f}{torch_us:>15}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({**machine(options), "table": table}, indent=1))


def check(dtype: torch.dtype) -> None:
    """Raises SystemExit where a kernel is absent or differs from float64."""
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(5, 576), torch.randn(8, 384, 576) / 24, torch.randn(8, 576, 192) / 14
    w13, w2 = w13.to(dtype), w2.to(dtype)
    if cpu_kernels(x, w13, w2) is None:
        raise SystemExit("the CPU kernels are not available here: install numba")
    ids = torch.stack([torch.randperm(8)[:4] for _ in range(5)])
    weights = torch.rand(5, 4)
    wide = (x.double(), w13.double(), w2.double())
    pairs = {
        "linear": (linear(x, w13[0]), linear(wide[0], wide[1][0])),
        "swiglu_mlp": (swiglu_mlp(x, w13[0], w2[0]), swiglu_mlp(wide[0], wide[1][0], wide[2][0])),
        "moe": (moe(x, w13, w2, ids, weights), moe_reference(*wide, ids, weights)),
    }
    for name, (got, expected) in pairs.items():
        error = (got - expected).abs().max().item()
        if not error < 1e-4:
            raise SystemExit(f"{name} is off by {error}, no figures")


def measure(num_rows: int, dtype: torch.dtype, rounds: int) -> list[Row]:
    out = []
    for n, k in SHAPES:
        ws = [torch.randn(n, k).to(dtype) for _ in range(copies(n * k, dtype))]
        x = torch.randn(num_rows, k)
        row = Figures(f"linear {n}x{k}", num_rows, n * k, num_rows * n * k, dtype)
        row(median_us(functools.partial(linear, x), ws, rounds))
        row.values["torch_fp32_us"] = median_us(
            functools.partial(functional.linear, x),
            [w.float() for w in ws[: max(2, len(ws) // 2)]],
            rounds,
        )
        out.append(row.values)
    return [*out, measure_moe(num_rows, dtype, rounds)]


def measure_moe(num_rows: int, dtype: torch.dtype, rounds: int) -> Row:
    layers = [
        (torch.randn(8, 384, 576).to(dtype), torch.randn(8, 576, 192).to(dtype))
        for _ in range(copies(8 * 576 * 576, dtype))
    ]
    x, weights = torch.randn(num_rows, 576), torch.rand(num_rows, 4)
    ids = torch.stack([torch.randperm(8)[:4] for _ in range(num_rows)])
    read = len(set(ids.flatten().tolist())) * 576 * 576
    row = Figures("moe 8x192 of 576, top 4", num_rows, read, num_rows * 4 * 576 * 576, dtype)
    row(median_us(lambda layer: moe(x, layer[0], layer[1], ids, weights), layers, rounds))
    return row.values


class Figures:
    """One row of the table: rates follow from the time and the work of a call."""

    def __init__(
        self, what: str, num_rows: int, num_weights: int, num_products: int, dtype: torch.dtype
    ) -> None:
        self.values: Row = {"what": what, "rows": num_rows, "dtype": str(dtype)}
        self._bytes, self._flop = num_weights * dtype.itemsize, 2 * num_products

    def __call__(self, us: float) -> None:
        self.values |= {
            "us": us,
            "gb_per_s": self._bytes / us / 1e3,
            "gflop_per_s": self._flop / us / 1e3,
        }


def copies(num_weights: int, dtype: torch.dtype) -> int:
    return max(2, COLD_BYTES // (num_weights * dtype.itemsize))


def median_us(call: Callable[[T], object], inputs: Sequence[T], rounds: int) -> float:
    """Time of one call, over rounds that each go through all inputs."""
    times = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        for item in inputs:
            call(item)
        times.append((time.perf_counter() - start_s) / len(inputs) * 1e6)
    return statistics.median(times[1:])


def machine(options: argparse.Namespace) -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return {
        "machine": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": options.threads,
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
