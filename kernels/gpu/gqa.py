"""Grouped-query attention of single queries over paged keys and values: the heads that share a key
head share a tile. The specification is kernels.attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.card import Card
from kernels.gpu.shares import MAX_QUERIES, ends_of, item, merge, queries_of

LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    q,  # [DIM_PAD] columns of BLOCK_H heads, loaded
    keys,  # [rows, num_kv, dim] at this key head
    values,
    pages,  # [P] of this query
    begin,
    end,  # keys [begin, end) of the query
    key_row, value_row,  # strides
    scale,  # times log2(e)
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(out [BLOCK_H, DIM_PAD], lse [BLOCK_H] base 2) over at least one key."""
    d = tl.arange(0, DIM_PAD)
    highest = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, DIM_PAD], tl.float32)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK_N)
        inside = key < end
        row = tl.load(pages + key // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + key % PAGE
        whole = inside[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + row[:, None] * key_row + d[None, :], mask=whole, other=0.0)
        v = tl.load(values + row[:, None] * value_row + d[None, :], mask=whole, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_H, BLOCK_N]
        s = tl.where(inside[None, :], s, -float("inf"))
        higher = tl.maximum(highest, tl.max(s, axis=1) * scale)
        old = tl.exp2(highest - higher)
        p = tl.exp2(s * scale - higher[:, None])
        total = total * old + tl.sum(p, axis=1)
        highest = higher
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    return acc / total[:, None], highest + tl.log2(total)


@triton.jit(do_not_specialize=["num_queries"])
def _shared(
    q,  # [N, num_kv · group, DIM]
    keys,  # [rows, num_kv, DIM]
    values,
    pages,  # [N, P]
    counts,  # [N]
    out,  # [N, num_kv · group, DIM], contiguous
    part_out, part_lse,  # see kernels.gpu.shares
    q_query, q_head, key_row, key_head, value_row, value_head, page_query,  # strides
    num_queries, group, scale,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """A program a share of all queries' blocks, for one key head."""
    shared = tl.program_id(0)
    program = tl.program_id(1)
    num_heads = tl.num_programs(0) * group
    m = tl.arange(0, BLOCK_H)
    h = shared * group + m
    d = tl.arange(0, DIM_PAD)
    live = (m < group)[:, None] & (d < DIM)[None, :]
    keys += shared.to(tl.int64) * key_head
    values += shared.to(tl.int64) * value_head
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
        heads = q + n.to(tl.int64) * q_query + h[:, None] * q_head
        own = tl.load(heads + d[None, :], mask=live, other=0.0)
        acc, lse = _attend(
            own, keys, values, pages + n.to(tl.int64) * page_query, (at - begin) * BLOCK_N, last,
            key_row, value_row, scale, DIM, DIM_PAD, PAGE, BLOCK_H, BLOCK_N, STAGES,
        )  # fmt: skip
        if (at == begin) & (till == end):
            place = (n.to(tl.int64) * num_heads + h) * DIM
            tl.store(out + place[:, None] + d[None, :], acc, mask=live)
        else:
            place = (program + n).to(tl.int64) * num_heads + h
            tl.store(part_out + place[:, None] * DIM + d[None, :], acc, mask=live)
            tl.store(part_lse + place, lse, mask=m < group)
        at = till


@dataclass(frozen=True, slots=True)
class Tiling:
    block_n: int
    warps: int
    stages: int
    per_processor: int  # programs that one multiprocessor runs at once


def tiling_of(dim: int, dtype: torch.dtype, card: Card) -> Tiling:
    """dim: padded."""
    if dtype == torch.float32:
        return Tiling(32, 4, 1, 2)
    # Two of the stages look pages up; a key and a value block lie in each of the others.
    block_bytes = 2 * 64 * dim * dtype.itemsize
    return Tiling(64, 4, max(2, min(6, card.shared_bytes // block_bytes + 1)), 3)


def gqa_paged(
    q: torch.Tensor,  # [N, num_heads, D]
    keys: torch.Tensor,  # [rows, num_kv_heads, D]
    values: torch.Tensor,  # [rows, num_kv_heads, D]
    pages: torch.Tensor,  # [N, P]
    counts: torch.Tensor,  # [N]
    page_size: int,
    scale: float,
    card: Card,
    tiling: Tiling | None = None,
) -> torch.Tensor:  # [N, num_heads, D]
    """As kernels.attention.gqa_paged, for at most MAX_QUERIES queries."""
    num, num_heads, dim = q.shape
    if num > MAX_QUERIES:
        raise ValueError(f"at most {MAX_QUERIES} queries, got {num}")
    q, keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, keys, values))
    num_kv = keys.shape[1]
    group = num_heads // num_kv
    padded = max(16, int(triton.next_power_of_2(dim)))
    t = tiling or tiling_of(padded, q.dtype, card)
    programs = max(1, card.num_processors * t.per_processor // num_kv)
    out = torch.empty(num, num_heads, dim, dtype=q.dtype, device=q.device)
    part_out = torch.empty(programs + num, num_heads, dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(programs + num, num_heads, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:2], *keys.stride()[:2], *values.stride()[:2], pages.stride(0))
    _shared[(num_kv, programs)](
        q, keys, values, pages, counts, out, part_out, part_lse, *strides, num, group,
        scale * LOG2_E, DIM=dim, DIM_PAD=padded, PAGE=page_size,
        BLOCK_H=max(16, triton.next_power_of_2(group)), BLOCK_N=t.block_n, STAGES=t.stages,
        QUERIES=queries_of(num), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    merge(part_out, part_lse, counts, out, programs, t.block_n)
    return out
