"""Latent attention whose queries read rows of their own, chosen or by page: any widths and dtypes.
All heads of a tile share each row that is read. The specification is kernels.attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.card import Card
from kernels.gpu.shares import MAX_QUERIES, ends_of, item, merge, queries_of

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    q,  # [N, H, Q_LATENT ? LATENT + ROPE : ROPE], strides below, the last 1
    cache,  # [rows, >= LATENT + ROPE], the last stride 1
    index,  # [N, width]: rows, or pages where PAGE > 0
    n,
    tile,  # heads tile · BLOCK_H and on
    begin,
    end,  # keys [begin, end) of this query
    q_query, q_head, cache_row, index_query,  # strides
    num_heads,
    scale,  # times log2(e)
    LATENT: tl.constexpr, LATENT_1: tl.constexpr, LATENT_2: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, Q_LATENT: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """(acc [BLOCK_H, LATENT_1], acc of the rest [BLOCK_H, LATENT_2], lse [BLOCK_H] base 2) over the
    keys [begin, end), at least one; the accumulators are divided already."""
    h = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    d1 = tl.arange(0, LATENT_1)
    d2 = LATENT_1 + tl.arange(0, LATENT_2)
    dr = tl.arange(0, ROPE_PAD)
    at = q + n.to(tl.int64) * q_query + h[:, None] * q_head  # [BLOCK_H, 1]
    live = h[:, None] < num_heads
    if Q_LATENT:
        q1 = tl.load(at + d1[None, :], mask=live, other=0.0)
        if LATENT_2 > 1:
            q2 = tl.load(at + d2[None, :], mask=live & (d2 < LATENT)[None, :], other=0.0)
        at += LATENT
    qr = tl.load(at + dr[None, :], mask=live & (dr < ROPE)[None, :], other=0.0)
    highest = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc1 = tl.zeros([BLOCK_H, LATENT_1], tl.float32)
    acc2 = tl.zeros([BLOCK_H, LATENT_2], tl.float32)
    own = index + n.to(tl.int64) * index_query
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK_N)
        inside = key < end
        if PAGE > 0:
            row = tl.load(own + key // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + key % PAGE
        else:
            row = tl.load(own + key, mask=inside, other=0).to(tl.int64)
        place = cache + row[:, None] * cache_row  # [BLOCK_N, 1]
        k1 = tl.load(place + d1[None, :], mask=inside[:, None], other=0.0)
        kr = tl.load(
            place + LATENT + dr[None, :], mask=inside[:, None] & (dr < ROPE)[None, :], other=0.0
        )
        s = tl.dot(qr, tl.trans(kr), input_precision="ieee")  # [BLOCK_H, BLOCK_N]
        if Q_LATENT:
            s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
        if LATENT_2 > 1:
            k2 = tl.load(
                place + d2[None, :], mask=inside[:, None] & (d2 < LATENT)[None, :], other=0.0
            )
            if Q_LATENT:
                s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
        s = tl.where(inside[None, :], s, -float("inf"))
        higher = tl.maximum(highest, tl.max(s, axis=1) * scale)
        old = tl.exp2(highest - higher)
        p = tl.exp2(s * scale - higher[:, None])
        total = total * old + tl.sum(p, axis=1)
        highest = higher
        p = p.to(k1.dtype)
        acc1 = tl.dot(p, k1, acc1 * old[:, None], input_precision="ieee")
        if LATENT_2 > 1:
            acc2 = tl.dot(p, k2, acc2 * old[:, None], input_precision="ieee")
    return acc1 / total[:, None], acc2 / total[:, None], highest + tl.log2(total)


@triton.jit
def _store(
    target, row, h, acc1, acc2, num_heads,
    LATENT: tl.constexpr, LATENT_1: tl.constexpr, LATENT_2: tl.constexpr,
):  # fmt: skip
    """target [.., num_heads, LATENT] at [row, h]"""
    d1 = tl.arange(0, LATENT_1)
    at = target + (row.to(tl.int64) * num_heads + h)[:, None] * LATENT
    live = h[:, None] < num_heads
    tl.store(at + d1[None, :], acc1, mask=live)
    if LATENT_2 > 1:
        d2 = LATENT_1 + tl.arange(0, LATENT_2)
        tl.store(at + d2[None, :], acc2, mask=live & (d2 < LATENT)[None, :])


@triton.jit
def _whole(
    q, cache, index, counts,
    out,  # [N, H, LATENT]
    lse,  # [N, H] float32, natural, where KEEP
    q_query, q_head, cache_row, index_query,
    num_heads, scale,
    LATENT: tl.constexpr, LATENT_1: tl.constexpr, LATENT_2: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, Q_LATENT: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """A program a query and tile of heads, the tiles of a query side by side; in one dimension, as
    a grid's others are short."""
    tiles = tl.cdiv(num_heads, BLOCK_H)
    tile = tl.program_id(0) % tiles
    n = tl.program_id(0) // tiles
    h = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    end = tl.load(counts + n).to(tl.int32)
    lse += n.to(tl.int64) * num_heads + h
    if end == 0:
        if KEEP:
            tl.store(lse, tl.full([BLOCK_H], -float("inf"), tl.float32), mask=h < num_heads)
        zero1 = tl.zeros([BLOCK_H, LATENT_1], tl.float32)
        zero2 = tl.zeros([BLOCK_H, LATENT_2], tl.float32)
        _store(out, n, h, zero1, zero2, num_heads, LATENT, LATENT_1, LATENT_2)
    else:
        acc1, acc2, found = _attend(
            q, cache, index, n, tile, 0, end, q_query, q_head, cache_row, index_query, num_heads,
            scale, LATENT, LATENT_1, LATENT_2, ROPE, ROPE_PAD, Q_LATENT, PAGE, BLOCK_H, BLOCK_N,
            STAGES,
        )  # fmt: skip
        _store(out, n, h, acc1, acc2, num_heads, LATENT, LATENT_1, LATENT_2)
        if KEEP:
            tl.store(lse, found * LN_2, mask=h < num_heads)


@triton.jit(do_not_specialize=["num_queries"])
def _shared(
    q, cache, index, counts, out, part_out, part_lse,  # see kernels.gpu.shares
    q_query, q_head, cache_row, index_query,
    num_queries, num_heads, scale,
    LATENT: tl.constexpr, LATENT_1: tl.constexpr, LATENT_2: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, Q_LATENT: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """A program a share of all queries' blocks, for one tile of heads."""
    tile = tl.program_id(0)
    program = tl.program_id(1)
    h = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    ends = ends_of(counts, num_queries, BLOCK_N, QUERIES)
    blocks = tl.max(ends, axis=0)
    share = tl.maximum(tl.cdiv(blocks, tl.num_programs(1)), 1)
    at = program * share
    stop = tl.minimum(at + share, blocks)
    while at < stop:
        n = tl.sum((ends <= at).to(tl.int32), axis=0)
        begin = item(ends, n - 1, QUERIES)
        end = item(ends, n, QUERIES)
        till = tl.minimum(stop, end)
        last = tl.minimum((till - begin) * BLOCK_N, tl.load(counts + n).to(tl.int32))
        acc1, acc2, lse = _attend(
            q, cache, index, n, tile, (at - begin) * BLOCK_N, last, q_query, q_head, cache_row,
            index_query, num_heads, scale, LATENT, LATENT_1, LATENT_2, ROPE, ROPE_PAD, Q_LATENT,
            PAGE, BLOCK_H, BLOCK_N, STAGES,
        )  # fmt: skip
        if (at == begin) & (till == end):
            _store(out, n, h, acc1, acc2, num_heads, LATENT, LATENT_1, LATENT_2)
        else:
            piece = program + n
            _store(part_out, piece, h, acc1, acc2, num_heads, LATENT, LATENT_1, LATENT_2)
            tl.store(part_lse + piece.to(tl.int64) * num_heads + h, lse, mask=h < num_heads)
        at = till


@dataclass(frozen=True, slots=True)
class Tiling:
    block_h: int
    block_n: int
    warps: int
    stages: int
    per_processor: int = 1  # programs that one multiprocessor runs at once


_TILINGS = (
    Tiling(64, 64, 8, 2),
    Tiling(32, 64, 8, 2),
    Tiling(16, 64, 4, 2, 2),
    Tiling(16, 32, 4, 2),
)


def tiling_of(num_heads: int, width: int, dtype: torch.dtype, card: Card) -> Tiling:
    """The largest tiles that the heads fill and the card has room for; width: a row's, padded."""
    if dtype == torch.float32:
        return Tiling(16, 16, 8, 1)
    for t in _TILINGS:
        shared_bytes = (t.block_h + t.block_n * t.stages) * width * dtype.itemsize
        if t.block_h < 2 * max(num_heads, 9) and shared_bytes <= card.shared_bytes:
            return t
    return Tiling(16, 16, 4, 1)


def mla_latents(
    q: torch.Tensor,  # [N, H, LATENT + ROPE or ROPE]
    cache: torch.Tensor,  # [rows, LATENT + ROPE]
    index: torch.Tensor,  # [N, K] rows, or [N, P] pages
    counts: torch.Tensor,  # [N]
    page_size: int,  # 0: the index holds rows
    latent_dim: int,
    scale: float,
    card: Card,
    tiling: Tiling | None = None,
) -> torch.Tensor:  # [N, H, LATENT] in q's dtype
    """The weighted latents of each query over its rows or pages."""
    num, num_heads, _ = q.shape
    q = q if q.stride(-1) == 1 else q.contiguous()
    sizes = _widths(q, cache, latent_dim) | {"PAGE": page_size}
    t = tiling or tiling_of(num_heads, _padded(sizes), q.dtype, card)
    sizes |= _options(t)
    out = torch.empty(num, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    tiles = triton.cdiv(num_heads, t.block_h)
    strides = (q.stride(0), q.stride(1), cache.stride(0), index.stride(0))
    scale *= LOG2_E
    num_programs = card.num_processors * t.per_processor
    if num * tiles >= 4 * num_programs or num > MAX_QUERIES:
        _whole[(tiles * num,)](
            q, cache, index, counts, out, out, *strides, num_heads, scale, **sizes, KEEP=False
        )
        return out
    programs = max(1, num_programs // tiles)
    slots = programs + num
    part_out = torch.empty(slots, num_heads, latent_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(slots, num_heads, dtype=torch.float32, device=q.device)
    _shared[(tiles, programs)](
        q, cache, index, counts, out, part_out, part_lse, *strides, num, num_heads, scale,
        **sizes, QUERIES=queries_of(num),
    )  # fmt: skip
    merge(part_out, part_lse, counts, out, programs, t.block_n)
    return out


def mla_part(
    q: torch.Tensor,  # as for mla_latents
    cache: torch.Tensor,
    rows: torch.Tensor,  # [N, K]
    counts: torch.Tensor,
    latent_dim: int,
    scale: float,
    card: Card,
    out: torch.Tensor,  # [N, H, LATENT] float32, contiguous: is written
    lse: torch.Tensor,  # [N, H, 1] float32, contiguous: is written, natural
) -> None:
    """The same for a part of the rows, with what it takes to merge it with other parts."""
    num, num_heads, _ = q.shape
    q = q if q.stride(-1) == 1 else q.contiguous()
    sizes = _widths(q, cache, latent_dim) | {"PAGE": 0}
    t = tiling_of(num_heads, _padded(sizes), q.dtype, card)
    _whole[(triton.cdiv(num_heads, t.block_h) * num,)](
        q, cache, rows, counts, out, lse, q.stride(0), q.stride(1), cache.stride(0),
        rows.stride(0), num_heads, scale * LOG2_E, **sizes, **_options(t), KEEP=True,
    )  # fmt: skip


def _widths(q: torch.Tensor, cache: torch.Tensor, latent_dim: int) -> dict[str, int]:
    """What of the rows' layout the kernels are compiled for."""
    rope = cache.shape[1] - latent_dim
    latent_1 = 1 << (latent_dim.bit_length() - 1)
    rest = latent_dim - latent_1
    return {
        "LATENT": latent_dim,
        "LATENT_1": latent_1,
        "LATENT_2": max(16, triton.next_power_of_2(rest)) if rest else 1,
        "ROPE": rope,
        "ROPE_PAD": max(16, triton.next_power_of_2(rope)),
        "Q_LATENT": q.shape[2] > rope,
    }


def _padded(widths: dict[str, int]) -> int:
    """Columns of a row in shared memory."""
    return widths["LATENT_1"] + widths["LATENT_2"] + widths["ROPE_PAD"]


def _options(t: Tiling) -> dict[str, int]:
    return {
        "BLOCK_H": t.block_h,
        "BLOCK_N": t.block_n,
        "STAGES": t.stages,
        "num_warps": t.warps,
        "num_stages": t.stages,
    }
