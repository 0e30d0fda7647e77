"""Products of 16-bit activations with weights in block fp8. The specification is kernels.linear.

e4m3 is exact in either 16-bit type, so products are exact and their sums over a block of K get the
block's scale in float32. Few rows are bound by reading the weights, which are the wide side then;
for many rows, weights are widened slice by slice, for the library's product and for the experts'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.block_fp8 import BLOCK, BlockFp8
from kernels.gpu.card import card_of

_BLOCK = tl.constexpr(BLOCK)
_MANY_ROWS: Final = 256  # more are the library's
_SLICE_ELEMENTS: Final = 1 << 25  # widened at a time
# Of all experts, widened at a time. Few parts, as each ends with processors that have run out of
# work; of a chunk of 8192 tokens the activations of all pairs take as much.
_PART_ELEMENTS: Final = 1 << 29


@triton.jit
def widen(codes, dtype: tl.constexpr):
    """e4m3 -> dtype, exactly. By way of float32: Hopper converts to bfloat16 in pairs from there,
    and one by one from anything else."""
    return codes.to(tl.float32).to(dtype)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "blocks_each"])
def _linear(
    x,  # descriptor of [T, K], blocks of [ROWS, BLOCK]
    codes,  # descriptor of [N, K], blocks of [COLUMNS, BLOCK]
    scales,  # [ceil(N / BLOCK), num_blocks]
    out,  # [T, N], added to where ADDS; where SPLITS float32 [splits, T, N]
    num_rows,  # T
    num_columns,  # N
    num_blocks,  # ceil(K / BLOCK)
    blocks_each,  # of a split
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides BLOCK
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    ADDS: tl.constexpr,  # where not SPLITS
):
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    split = tl.program_id(2)
    first = split * blocks_each
    last = tl.minimum(first + blocks_each, num_blocks)
    scale_at = scales + column // _BLOCK * num_blocks
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        a = x.load([row, block * _BLOCK])
        w = codes.load([column, block * _BLOCK])
        scale = tl.load(scale_at + block)
        total += scale * tl.dot(widen(w, a.dtype), tl.trans(a))
    result = tl.trans(total)
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    at = out + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    if SPLITS:
        at += split.to(tl.int64) * num_rows * num_columns
    elif ADDS:
        result += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _sum_splits(
    parts,  # [splits, size]
    out,  # [size], added to where ADDS
    splits,
    size,
    ADDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = at < size
    total = tl.zeros([CHUNK], tl.float32)
    if ADDS:
        total += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    for _ in range(splits):
        total += tl.load(parts + at, mask=inside, other=0.0)
        parts += size
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "scales_stride"])
def _dequantise(
    codes,  # [M, N, K] of matrices codes_stride apart
    scales,  # [M, ceil(N / BLOCK), ceil(K / BLOCK)] of matrices scales_stride apart
    out,  # [M, N, K]
    num_rows,
    num_columns,
    codes_stride,
    scales_stride,
    ROWS: tl.constexpr,  # divides BLOCK
):
    matrix = tl.program_id(2).to(tl.int64)
    row, block = tl.program_id(1) * ROWS, tl.program_id(0)
    rows, columns = row + tl.arange(0, ROWS), block * _BLOCK + tl.arange(0, _BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    at = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    code = tl.load(codes + matrix * codes_stride + at, mask=mask, other=0.0)
    scale_at = matrix * scales_stride + row // _BLOCK * tl.cdiv(num_columns, _BLOCK) + block
    wide = code.to(tl.float32) * tl.load(scales + scale_at)
    out += matrix * num_rows * num_columns
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Tile:
    """How the product for few rows is cut."""

    rows: int
    columns: int
    warps: int
    stages: int
    splits: int


def linear(
    x: torch.Tensor,  # [T, K] in 16 bits
    w: BlockFp8,  # [N, K], K a multiple of 16
    out: torch.Tensor | None = None,  # [T, N] contiguous, in x's dtype: the product is added to it
    *,
    tile: Tile | None = None,
) -> torch.Tensor:  # [T, N]
    num_rows, num_columns = len(x), w.shape[0]
    adds = out is not None
    if out is None:
        out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    if tile is None and num_rows > _MANY_ROWS:
        return _linear_for_many(x, w, out, adds)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # also where one row is contiguous
    num_blocks = w.scales.shape[1]
    tile = tile or tile_of(num_rows, num_columns, num_blocks, x.device)
    splits, target = tile.splits, out
    if splits > 1:
        parts = (splits, num_rows, num_columns)
        target = torch.empty(parts, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_columns, tile.columns), splits)
    _linear[grid](
        TensorDescriptor.from_tensor(x, [tile.rows, BLOCK]),
        TensorDescriptor.from_tensor(w.codes, [tile.columns, BLOCK]),
        w.scales, target, num_rows, num_columns, num_blocks, triton.cdiv(num_blocks, splits),
        ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages, SPLITS=splits > 1,
        ADDS=adds and splits == 1, num_warps=tile.warps,
    )  # fmt: skip
    if splits > 1:
        chunk = 1024
        _sum_splits[(triton.cdiv(out.numel(), chunk),)](
            target, out, splits, out.numel(), ADDS=adds, CHUNK=chunk, num_warps=4
        )
    return out


def tile_of(num_rows: int, num_columns: int, num_blocks: int, device: torch.device) -> Tile:
    """As many splits as fill the card once, none of less than four blocks. Few heights, as each is
    compiled; rows that are not there cost no traffic."""
    rows = min(128, max(32, triton.next_power_of_2(num_rows)))
    warps, stages, resident = {32: (4, 4, 2), 64: (4, 3, 2), 128: (8, 3, 1)}[rows]
    tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, BLOCK)
    splits = resident * card_of(device).num_processors // tiles
    splits = max(1, min(splits, num_blocks // 4))
    # As many as have blocks: no split is left without.
    splits = triton.cdiv(num_blocks, triton.cdiv(num_blocks, splits))
    return Tile(rows, BLOCK, warps, stages, splits)


def _linear_for_many(x: torch.Tensor, w: BlockFp8, out: torch.Tensor, adds: bool) -> torch.Tensor:
    num_columns, depth = w.shape
    step = max(BLOCK, _SLICE_ELEMENTS // depth // BLOCK * BLOCK)
    wide = torch.empty((min(step, num_columns), depth), dtype=x.dtype, device=x.device)
    for begin in range(0, num_columns, step):
        part = dequantise(w[begin : begin + step], wide)
        target = out[:, begin : begin + step]
        if adds:
            target.addmm_(x, part.t())
        else:
            torch.mm(x, part.t(), out=target)
    return out


def widened(
    w: BlockFp8,  # [E, halves · N, K]
    halves: int,
    dtype: torch.dtype,
    unit: int,  # what begins a part is a multiple of it; a multiple of BLOCK
) -> Iterator[tuple[int, torch.Tensor]]:
    """(where it begins, [E, halves · columns, K]) for each part of the N columns of a product, the
    same ones of each half. They share their memory: one is used up before the next is asked for."""
    num_experts, num_columns, depth = w.shape
    matrices = num_experts * halves
    own = w.view(matrices, num_columns // halves, depth)
    num_columns //= halves
    most = max(1, _PART_ELEMENTS // (matrices * depth * unit)) * unit
    parts = triton.cdiv(num_columns, most)
    step = triton.cdiv(num_columns, parts * unit) * unit  # as even as they can be
    shape = (matrices, min(step, num_columns), depth)
    wide = torch.empty(shape, dtype=dtype, device=w.codes.device)
    for begin in range(0, num_columns, step):
        codes = own.codes[:, begin : begin + step]
        scales = own.scales[:, begin // BLOCK : triton.cdiv(begin + step, BLOCK)]
        part = dequantise(BlockFp8(codes, scales), wide)
        yield begin, part.view(num_experts, -1, depth)


def dequantise(w: BlockFp8, out: torch.Tensor) -> torch.Tensor:
    """w [N, K], or [M, N, K] each matrix of which is contiguous, into the first numbers of out
    contiguous, which are returned in w's shape."""
    num_rows, num_columns = w.shape[-2:]
    codes = w.codes.view(-1, num_rows, num_columns)
    scales = w.scales.view(-1, *w.scales.shape[-2:])
    rows = 32
    _dequantise[(triton.cdiv(num_columns, BLOCK), triton.cdiv(num_rows, rows), len(codes))](
        codes, scales, out, num_rows, num_columns, codes.stride(0), scales.stride(0),
        ROWS=rows, num_warps=4,
    )  # fmt: skip
    return out.view(-1)[: codes.numel()].view(w.shape)
