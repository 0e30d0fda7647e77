"""Weights in block fp8 on one CUDA device, linears and experts: right first, then how fast.

    python -m benchmarks.gpu_fp8_weights --output out.json
    python -m benchmarks.gpu_fp8_weights --prefill
    python -m benchmarks.gpu_fp8_weights --tiles [--only "7168 x 16384"]

Shapes are DeepSeek-V3.2's. Beside ours: the same product with weights in bf16, and what DeepGEMM
took in fp8 on a card of the same model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu_kernels import (
    CHOICES,
    EXPERTS,
    HIDDEN,
    INNER,
    L2_BYTES,
    Row,
    ceilings,
    draw,
    error,
    timed,
)
from kernels.block_fp8 import BlockFp8
from kernels.gpu import block_fp8, moe
from kernels.gpu.ahead import compiling
from kernels.gpu.moe_tiles import FP8_IN_KERNEL, WIDE, Tile, tiles_for
from kernels.moe import moe_reference

T = TypeVar("T")
# The layer's input, q_b, o, the shared expert's two.
MATRICES = [(2240, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048)]
# What experts with many pairs may be computed by. The last: less of a step is not overlapped, but
# more is read (gate and up), and more of the last tile is empty (down).
PREFILLS = {
    "widened": WIDE,
    "in kernel": FP8_IN_KERNEL,
    "in kernel, other": (
        Tile(128, 64, 64, 4, 3, False, dequantises=True),
        Tile(256, 128, 64, 8, 3, False, dequantises=True),
    ),
}
DEEPGEMM = {(16, 2240, 7168): 10.5, (16, 24576, 1536): 14.3, (16, 7168, 16384): 35.1}  # µs


def draw_fp8(*shape: int) -> BlockFp8:
    """normal(0, 1 / sqrt(K)), each matrix of more than two dimensions by itself."""
    w = BlockFp8.empty(*shape, device=torch.device("cuda"))
    for i in range(len(w.codes) if len(shape) == 3 else 1):
        own = BlockFp8.quantised(draw(*shape[-2:], dtype=torch.float32) * shape[-1] ** -0.5)
        part = w[i] if len(shape) == 3 else w
        part.codes.copy_(own.codes)
        part.scales.copy_(own.scales)
    return w


def gate(prefill: bool) -> None:
    """Ends the program where a kernel is wrong."""
    if wrong := [*([] if prefill else _wrong_linears()), *_wrong_experts(prefill)]:
        sys.exit(f"wrong: {', '.join(wrong)}; no figures of what is wrong")


def _wrong_linears() -> Iterator[str]:
    for columns, depth in (*MATRICES, (300, 528)):
        w = draw_fp8(columns, depth)
        exact = w.to(torch.float64)
        for num in (1, 16, 33, 64, 128, 200, 700):
            x, h = draw(num, depth), draw(num, columns)
            want = x.double() @ exact.t()
            got = block_fp8.linear(x, w)
            added = block_fp8.linear(x, w, h.clone())
            # What is summed in bf16 would be off by more than the one rounding.
            limit = 2.5e-3 if num <= 256 else 4e-3
            if not error(got, want) < limit or not error(added, want + h.double()) < limit:
                yield f"linear {num} x {columns} x {depth}: {error(got, want):.1e}"


def _wrong_experts(prefill: bool) -> Iterator[str]:
    """Of as many experts and choices as are measured, so that few kernels are compiled for this."""
    w13, w2 = draw_fp8(EXPERTS, 2 * 512, 1024), draw_fp8(EXPERTS, 1024, 512)
    wide = w13.to(torch.float64), w2.to(torch.float64)
    x, (ids, weights) = draw(1000, 1024), _routed(1000)
    with compiling():  # at once, as each takes seconds
        for tiles in PREFILLS.values():
            moe.add_moe_(x.clone(), x, w13, w2, ids, weights, None, adds=False, tiles=tiles)
    cases: list[tuple[int, str]] = [(1000, form) for form in PREFILLS]
    if not prefill:
        cases += [(num, "") for num in (1, 20, 100)]
    for num, form in cases:
        x, (ids, weights) = draw(num, 1024), _routed(num)
        want = moe_reference(x.double(), *wide, ids, weights.double())
        got = torch.full_like(x, torch.nan)
        with mock.patch.object(block_fp8, "_PART_ELEMENTS", 1):  # parts as small as they can be
            moe.add_moe_(got, x, w13, w2, ids, weights, None, adds=False, tiles=PREFILLS.get(form))
        if not error(got, want) < 1e-2:
            yield f"experts for {num} tokens {form}: {error(got, want):.1e}"


def linears(flops_ceiling: float, bytes_ceiling: float) -> list[Row]:
    rows = []
    for columns, depth in MATRICES:
        copies = max(2, min(16, 3 * L2_BYTES // (columns * depth)))
        held = [draw_fp8(columns, depth) for _ in range(copies)]
        wide = [w.to(torch.bfloat16) for w in held]
        for num in (1, 16, 32, 64, 128, 256, 1024, 8192):
            x = draw(num, depth)
            took = timed([partial(block_fp8.linear, x, w) for w in held])
            beside = timed([partial(torch.nn.functional.linear, x, w) for w in wide])
            tflops = 2 * num * columns * depth / took / 1e6
            rate = columns * depth / took / 1e6
            ceiling = max(tflops / flops_ceiling, rate / bytes_ceiling)
            shape = f"{num} x {columns} x {depth}"
            rows.append(Row("linear fp8", shape, took, tflops, rate, ceiling, "bf16", beside))
            if (num, columns, depth) in DEEPGEMM:
                peer = ("DeepGEMM", DEEPGEMM[num, columns, depth])
                rows.append(Row("linear fp8", shape, took, tflops, rate, ceiling, *peer))
    return rows


def experts(flops_ceiling: float, bytes_ceiling: float) -> list[Row]:
    return _experts(
        {tokens: {"": None} for tokens in (1, 16, 32, 128)}, flops_ceiling, bytes_ceiling
    )


def prefills(flops_ceiling: float, bytes_ceiling: float) -> list[Row]:
    sizes = (1024, 2048, 4096, 8192)
    return _experts({tokens: dict(PREFILLS) for tokens in sizes}, flops_ceiling, bytes_ceiling)


def _experts(
    cases: dict[int, dict[str, tuple[Tile, Tile] | None]],
    flops_ceiling: float,
    bytes_ceiling: float,
) -> list[Row]:
    """For each number of tokens, the forms beside the product with weights in bf16."""
    w13, w2 = draw_fp8(EXPERTS, 2 * INNER, HIDDEN), draw_fp8(EXPERTS, HIDDEN, INNER)
    wide = w13.to(torch.bfloat16), w2.to(torch.bfloat16)
    rows = []
    for tokens, forms in cases.items():
        x, (ids, weights) = draw(tokens, HIDDEN), _routed(tokens)
        out = torch.empty_like(x)
        call = partial(moe.add_moe_, out, x, adds=False)
        rest = {"topk_ids": ids, "topk_weights": weights, "shared": None}
        beside = timed([partial(call, *wide, **rest)] * 3)
        for form, tiles in forms.items():
            took = timed([partial(call, w13, w2, **rest, tiles=tiles)] * 3)
            tflops = tokens * CHOICES * 3 * 2 * HIDDEN * INNER / took / 1e6
            rate = len(ids.unique()) * 3 * HIDDEN * INNER / took / 1e6
            ceiling = max(tflops / flops_ceiling, rate / bytes_ceiling)
            shape = f"{tokens} {form or 'tokens'}"
            rows.append(Row("experts fp8", shape, took, tflops, rate, ceiling, "bf16", beside))
    return rows


def _routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights."""
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOICES).indices
    return ids, torch.rand(tokens, CHOICES, device="cuda")


def tiles(only: str) -> None:
    """The fastest ways to cut each product, of many, beside what is taken by itself."""
    for columns, depth in MATRICES:
        if only not in f"{columns} x {depth}":
            continue
        held = [draw_fp8(columns, depth) for _ in range(max(2, 2 * L2_BYTES // (columns * depth)))]
        for num in (1, 32, 128):
            x = draw(num, depth)
            heights = [rows for rows in (16, 32, 64, 128) if num <= rows < 4 * num + 32]
            cuts = (
                block_fp8.Tile(*cut)
                for cut in product(heights, (64, 128), (4, 8), (3, 4, 6), (1, 2, 4, 8, 14))
                if cut[4] <= depth // 512
            )
            usual = block_fp8.tile_of(num, columns, -(-depth // 128), x.device)

            what = f"linear {num} x {columns} x {depth}"
            _fastest(what, usual, cuts, partial(_linear_calls, held, x))
    if only in "experts":
        _tiles_of_experts()


def _tiles_of_experts() -> None:
    """One product's cut at a time, the other's as it is."""
    w13, w2 = draw_fp8(EXPERTS, 2 * INNER, HIDDEN), draw_fp8(EXPERTS, HIDDEN, INNER)
    for tokens in (32, 128, 8192):
        x, (ids, weights) = draw(tokens, HIDDEN), _routed(tokens)
        out = torch.empty_like(x)
        usual = tiles_for(tokens * CHOICES, EXPERTS, x.dtype, w13.dtype)
        few = [Tile(16, *cut, True) for cut in product((64, 128), (128,), (4, 8), (3, 4, 5))]
        many = [
            Tile(*cut, first, True)
            for cut in product((64, 128, 256), (64, 128), (64, 128), (4, 8), (2, 3, 4))
            for first in (True, False)
        ]
        cuts = many if tokens == 8192 else few
        for which, name in enumerate(("gate_up", "down")):
            own = partial(_expert_calls, (out, x, w13, w2, ids, weights, None), usual, which)
            _fastest(f"experts' {name}, {tokens} tokens", usual[which], cuts, own)


def _linear_calls(
    held: list[BlockFp8], x: torch.Tensor, tile: block_fp8.Tile
) -> list[Callable[[], object]]:
    return [partial(block_fp8.linear, x, w, tile=tile) for w in held]


def _expert_calls(
    operands: tuple[Any, ...], usual: tuple[Tile, Tile], which: int, tile: Tile
) -> list[Callable[[], object]]:
    own = (tile, usual[1]) if which == 0 else (usual[0], tile)
    return [partial(moe.add_moe_, *operands, adds=False, tiles=own)] * 2


def _fastest(
    what: str, usual: T, cuts: Iterable[T], call: Callable[[T], list[Callable[[], object]]]
) -> None:
    took = []
    for cut in cuts:
        try:
            took.append((timed(call(cut), repeats=3), cut))
        except OutOfResources:
            continue
    print(f"{what}: {timed(call(usual)):.1f} µs with {usual}")
    for microseconds, cut in sorted(took, key=lambda pair: pair[0])[:4]:
        print(f"  {microseconds:.1f} µs with {cut}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--prefill", action="store_true", help="experts with many pairs alone")
    parser.add_argument("--tiles", action="store_true", help="try tilings instead")
    parser.add_argument("--only", default="", help="tilings of the products named so")
    args = parser.parse_args()
    torch.manual_seed(1)
    gate(args.prefill)
    if args.tiles:
        tiles(args.only)
        return
    flops, _, bandwidth = ceilings()
    print(f"{torch.cuda.get_device_name()}: {flops:.0f} TFLOP/s bf16, {bandwidth:.2f} TB/s")
    rows: list[Row] = []
    for part in (prefills,) if args.prefill else (linears, experts, prefills):
        found = part(flops, bandwidth)
        print("\n".join(map(str, found)), flush=True)
        rows += found
        torch.cuda.empty_cache()
    if args.output:
        result = {"card": torch.cuda.get_device_name(), "rows": [asdict(row) for row in rows]}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
