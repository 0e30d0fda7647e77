"""Routed experts as two grouped products. The specification is kernels.moe.

A program computes one tile of one expert's pairs. Where they are many, weights in block fp8 are
widened before, a part of every expert's columns at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.block_fp8 import BLOCK, BlockFp8, Weight
from kernels.gpu.block_fp8 import widen, widened
from kernels.gpu.groups import group, tile_of
from kernels.gpu.moe_tiles import Tile, most_row_tiles, tiles_for

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _product(a, b, total, WEIGHTS_FIRST: tl.constexpr):
    """total + a · bᵀ for a [ROWS, K] and b [COLUMNS, K]; as its transpose where WEIGHTS_FIRST."""
    if WEIGHTS_FIRST:
        return tl.dot(b, tl.trans(a), total, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), total, input_precision="ieee")


@triton.jit
def _scaled_product(a, codes, scale, total, WEIGHTS_FIRST: tl.constexpr, DEQUANTISES: tl.constexpr):
    """total + a · (scale · codes)ᵀ for codes in e4m3 of one block. Exact products, scaled by the
    block, have to be awaited; where the tensor cores are what is waited for, weights are rounded
    with their scales instead."""
    if DEQUANTISES:
        return _product(a, (codes.to(tl.float32) * scale).to(a.dtype), total, WEIGHTS_FIRST)
    else:
        own = _product(a, widen(codes, a.dtype), tl.zeros_like(total), WEIGHTS_FIRST)
        return total + scale * own


@triton.jit(do_not_specialize=["column_tiles"])
def _gate_up(
    x,  # [T, hidden]
    w13,  # [num_experts, 2 · inner, hidden]; where FP8 a descriptor of it, experts' rows in one
    scales,  # [num_experts, 2 · inner / _BLOCK, ceil(hidden / _BLOCK)]; read where FP8
    order,
    starts,
    out,  # [num_pairs, inner] of rows out_stride apart, by expert
    num_experts,
    hidden,
    inner,
    top_k,
    x_stride,
    out_stride,
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    EVEN: tl.constexpr,  # COLUMNS divides inner and DEPTH divides hidden
    FP8: tl.constexpr,  # COLUMNS and DEPTH divide _BLOCK, which divides inner
    DEQUANTISES: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert, begin, end, row_tile, column_tile = tile_of(
        starts, num_experts, column_tiles, ROWS, EXPERTS
    )
    if expert >= num_experts:
        return
    row = begin + row_tile * ROWS + tl.arange(0, ROWS)
    token = tl.load(order + row, mask=row < end, other=0).to(tl.int64) // top_k
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    a_at = x + token[:, None] * x_stride + k[None, :]
    first = expert * 2 * inner + column_tile * COLUMNS  # row of all experts'
    if FP8:
        gate_scale = scales + first // _BLOCK * tl.cdiv(hidden, _BLOCK)
        up_scale = gate_scale + inner // _BLOCK * tl.cdiv(hidden, _BLOCK)
    else:
        gate_at = w13 + (expert.to(tl.int64) * 2 * inner + column)[:, None] * hidden + k[None, :]
        up_at = gate_at + inner.to(tl.int64) * hidden
    if WEIGHTS_FIRST:
        gate = tl.zeros([COLUMNS, ROWS], tl.float32)
        up = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, hidden, DEPTH, num_stages=STAGES):
        deep = (at + k < hidden)[None, :]
        if EVEN:
            a = tl.load(a_at + at)
        else:
            a = tl.load(a_at + at, mask=deep, other=0.0)
        if FP8:
            g, u = w13.load([first, at]), w13.load([first + inner, at])
            g_scale, u_scale = tl.load(gate_scale + at // _BLOCK), tl.load(up_scale + at // _BLOCK)
            gate = _scaled_product(a, g, g_scale, gate, WEIGHTS_FIRST, DEQUANTISES)
            up = _scaled_product(a, u, u_scale, up, WEIGHTS_FIRST, DEQUANTISES)
        else:
            if EVEN:
                g = tl.load(gate_at + at)
                u = tl.load(up_at + at)
            else:
                g = tl.load(gate_at + at, mask=deep & (column < inner)[:, None], other=0.0)
                u = tl.load(up_at + at, mask=deep & (column < inner)[:, None], other=0.0)
            gate = _product(a, g, gate, WEIGHTS_FIRST)
            up = _product(a, u, up, WEIGHTS_FIRST)
    mixed = (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    if WEIGHTS_FIRST:
        mixed = tl.trans(mixed)
    address = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(address, mixed, mask=(row < end)[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize=["column_tiles"])
def _down(
    mixed,  # [num_pairs, inner], by expert
    w2,  # [num_experts, hidden, inner]; where FP8 a descriptor of it, experts' rows in one
    scales,  # [num_experts, hidden / _BLOCK, ceil(inner / _BLOCK)]; read where FP8
    order,
    starts,
    out,  # [num_pairs, hidden] of rows out_stride apart, as the pairs were given
    num_experts,
    hidden,
    inner,
    out_stride,
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    EVEN: tl.constexpr,  # COLUMNS divides hidden and DEPTH divides inner
    FP8: tl.constexpr,  # COLUMNS and DEPTH divide _BLOCK, which divides hidden
    DEQUANTISES: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert, begin, end, row_tile, column_tile = tile_of(
        starts, num_experts, column_tiles, ROWS, EXPERTS
    )
    if expert >= num_experts:
        return
    row = begin + row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    # Rows past the group's end are another expert's, or the first one's: read, never stored.
    inside = tl.where(row < end, row, begin)
    a_at = mixed + inside[:, None].to(tl.int64) * inner + k[None, :]
    first = expert * hidden + column_tile * COLUMNS  # row of all experts'
    if FP8:
        scale_at = scales + first // _BLOCK * tl.cdiv(inner, _BLOCK)
    else:
        w_at = w2 + (expert.to(tl.int64) * hidden + column)[:, None] * inner + k[None, :]
    if WEIGHTS_FIRST:
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, inner, DEPTH, num_stages=STAGES):
        deep = (at + k < inner)[None, :]
        if EVEN:
            a = tl.load(a_at + at)
        else:
            a = tl.load(a_at + at, mask=deep, other=0.0)
        if FP8:
            w, scale = w2.load([first, at]), tl.load(scale_at + at // _BLOCK)
            total = _scaled_product(a, w, scale, total, WEIGHTS_FIRST, DEQUANTISES)
        else:
            if EVEN:
                w = tl.load(w_at + at)
            else:
                w = tl.load(w_at + at, mask=deep & (column < hidden)[:, None], other=0.0)
            total = _product(a, w, total, WEIGHTS_FIRST)
    result = total.to(out.dtype.element_ty)
    if WEIGHTS_FIRST:
        result = tl.trans(result)
    pair = tl.load(order + row, mask=row < end, other=0).to(tl.int64)
    address = out + pair[:, None] * out_stride + column[None, :]
    tl.store(address, result, mask=(row < end)[:, None] & (column < hidden)[None, :])


@triton.jit
def _combine(
    parts,  # [T, top_k, hidden]
    weights,  # [T, top_k]
    shared,  # [T, hidden]; read where HAS_SHARED
    out,  # [T, hidden]; added to where ADDS, else written
    hidden,
    top_k,
    HAS_SHARED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(top_k):
        pair = token * top_k + choice
        part = tl.load(parts + pair * hidden + column, mask=inside, other=0.0)
        total += tl.load(weights + pair).to(tl.float32) * part.to(tl.float32)
    at = token * hidden + column
    if HAS_SHARED:
        total += tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total, mask=inside)


def add_moe_(
    out: torch.Tensor,  # [T, H] contiguous
    x: torch.Tensor,  # [T, H]
    w13: Weight,  # [E, 2I, H]
    w2: Weight,  # [E, H, I]
    topk_ids: torch.Tensor,  # [T, k]
    topk_weights: torch.Tensor,  # [T, k]
    shared: torch.Tensor | None,  # [T, H]: added, too
    *,
    adds: bool = True,
    tiles: tuple[Tile, Tile] | None = None,
) -> torch.Tensor:
    """out += (or, unless `adds`, =) moe(x, ...) + shared, summed in float32 and rounded once.
    The ids must be experts': nobody looks."""
    num_tokens, top_k = topk_ids.shape
    num_experts, hidden, _ = w2.shape
    if num_tokens == 0:
        return out
    num_pairs = num_tokens * top_k
    if tiles is None:
        gate_up, _ = tiles_for(num_pairs, num_experts, x.dtype, w13.dtype)
        _, down = tiles_for(num_pairs, num_experts, x.dtype, w2.dtype)
    else:
        gate_up, down = tiles
    order, starts = group(topk_ids, num_experts)
    mixed = _gated(x, w13, order, starts, top_k, gate_up)
    parts = _downed(mixed, w2, order, starts, down)
    block = min(2048, triton.next_power_of_2(hidden))
    _combine[(num_tokens, triton.cdiv(hidden, block))](
        parts, topk_weights.contiguous(), out if shared is None else shared, out, hidden, top_k,
        HAS_SHARED=shared is not None, ADDS=adds, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _gated(
    x: torch.Tensor,  # [T, H]
    w13: Weight,  # [E, 2I, H]
    order: torch.Tensor,  # [T · k]
    starts: torch.Tensor,  # [E + 1]
    top_k: int,
    tile: Tile,
) -> torch.Tensor:  # [T · k, I], by expert
    num_pairs, (num_experts, _, hidden), inner = len(order), w13.shape, w13.shape[1] // 2
    out = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    for begin, w in _parts(w13, 2, x.dtype, tile):
        width = w.shape[1] // 2
        columns = triton.cdiv(width, tile.columns)
        _gate_up[(most_row_tiles(num_pairs, num_experts, tile) * columns,)](
            x, *_operands(w, tile), order, starts, out[:, begin:], num_experts, hidden, width,
            top_k, x.stride(0), inner, columns,
            EXPERTS=triton.next_power_of_2(num_experts),
            EVEN=width % tile.columns == 0 and hidden % tile.depth == 0,
            FP8=isinstance(w, BlockFp8),
            **tile.constants,
        )  # fmt: skip
    return out


def _downed(
    mixed: torch.Tensor,  # [T · k, I], by expert
    w2: Weight,  # [E, H, I]
    order: torch.Tensor,  # [T · k]
    starts: torch.Tensor,  # [E + 1]
    tile: Tile,
) -> torch.Tensor:  # [T · k, H], as the pairs were given
    num_pairs, (num_experts, hidden, inner) = len(order), w2.shape
    out = torch.empty((num_pairs, hidden), dtype=mixed.dtype, device=mixed.device)
    for begin, w in _parts(w2, 1, mixed.dtype, tile):
        width = w.shape[1]
        columns = triton.cdiv(width, tile.columns)
        _down[(most_row_tiles(num_pairs, num_experts, tile) * columns,)](
            mixed, *_operands(w, tile), order, starts, out[:, begin:], num_experts, width, inner,
            hidden, columns,
            EXPERTS=triton.next_power_of_2(num_experts),
            EVEN=width % tile.columns == 0 and inner % tile.depth == 0,
            FP8=isinstance(w, BlockFp8),
            **tile.constants,
        )  # fmt: skip
    return out


def _parts(w: Weight, halves: int, dtype: torch.dtype, tile: Tile) -> Iterable[tuple[int, Weight]]:
    """Where each part's columns begin, and the part as its product takes it."""
    if tile.widens and isinstance(w, BlockFp8):
        return widened(w, halves, dtype, max(BLOCK, tile.columns))
    return [(0, w)]


def _operands(w: Weight, tile: Tile) -> tuple[torch.Tensor | TensorDescriptor, torch.Tensor]:
    """Weights and scales as the kernels take them."""
    if not isinstance(w, BlockFp8):
        return w, w
    rows = w.codes.view(-1, w.shape[-1])
    return TensorDescriptor.from_tensor(rows, [tile.columns, tile.depth]), w.scales
