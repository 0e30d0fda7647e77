"""Attention of a run of queries at positions first, first + stride, ... over keys in ascending
position, paged or contiguous, block by block without a mask in memory (Dao, FlashAttention-2).
Parts of a context may follow one another: each call merges into what the earlier ones left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.card import Card, card_of

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _add(
    acc, highest, total,  # [BLOCK_M, VALUE_PAD], [BLOCK_M], [BLOCK_M]
    q, q_rope,  # [BLOCK_M, DIM_PAD], [BLOCK_M, ROPE_PAD]
    keys, ropes, values, pages,
    begin, end, num_keys, last,  # keys [begin, end); last [BLOCK_M]: what each query may see
    key_row, rope_row, value_row,
    scale,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, DIM_PAD)
    dr = tl.arange(0, ROPE_PAD)
    dv = tl.arange(0, VALUE_PAD)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK_N)
        inside = key < num_keys
        if PAGE > 0:
            page = tl.load(pages + key // PAGE, mask=inside, other=0)
            row = page.to(tl.int64) * PAGE + key % PAGE
        else:
            row = key.to(tl.int64)
        row = row[:, None]
        live = inside[:, None]
        k_mask = live & (d < DIM)[None, :]
        v_mask = live & (dv < VALUE)[None, :]
        v = tl.load(values + row * value_row + dv[None, :], mask=v_mask, other=0.0)
        if DIM > 0:
            k = tl.load(keys + row * key_row + d[None, :], mask=k_mask, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if ROPE > 0:
            r_mask = live & (dr < ROPE)[None, :]
            r = tl.load(ropes + row * rope_row + dr[None, :], mask=r_mask, other=0.0)
            if DIM > 0:
                s = tl.dot(q_rope, tl.trans(r), s, input_precision="ieee")
            else:
                s = tl.dot(q_rope, tl.trans(r), input_precision="ieee")
        if MASKED:
            seen = key[None, :] <= last[:, None]
            s = tl.where(seen & inside[None, :], s, -float("inf"))
        higher = tl.maximum(highest, tl.max(s, axis=1) * scale)
        # A finite stand-in for the maximum of nothing: -inf less it is -inf, not NaN.
        base = tl.maximum(higher, -1e30) if MASKED else higher
        old = tl.exp2(highest - base)
        p = tl.exp2(s * scale - base[:, None])
        total = total * old + tl.sum(p, axis=1)
        highest = higher
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    return acc, highest, total


@triton.jit(do_not_specialize=["num_queries", "num_keys", "first"])
def _causal(
    q,  # [M, num_heads, DIM + ROPE]
    keys,  # [rows, num_kv, DIM]
    ropes,  # [rows, num_kv, ROPE]; rope_head is 0 where all heads share them
    values,  # [rows, num_kv, VALUE]
    pages,  # [P]
    out,  # [M, num_heads, VALUE]
    lse,  # [M, num_heads] float32, natural
    q_query, q_head, key_row, key_head, rope_row, rope_head, value_row, value_head,  # strides
    num_queries, num_keys, first, stride, group, scale,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, PAGE: tl.constexpr,
    MERGE: tl.constexpr,  # out and lse hold the earlier keys' part
    KEEP: tl.constexpr,  # write lse
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program BLOCK_M queries of one head; query i sees the keys 0 .. first + i · stride."""
    h = tl.program_id(0)
    num_heads = tl.num_programs(0)
    # The last queries see most: they start first.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = i < num_queries
    d = tl.arange(0, DIM_PAD)
    dr = tl.arange(0, ROPE_PAD)
    dv = tl.arange(0, VALUE_PAD)
    shared = (h // group).to(tl.int64)
    own = q + i.to(tl.int64)[:, None] * q_query + h * q_head  # [BLOCK_M, 1]
    q_main = tl.load(own + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    q_rope = tl.load(own + DIM + dr[None, :], mask=live[:, None] & (dr < ROPE)[None, :], other=0.0)
    last = first + i * stride
    lowest = first + block * BLOCK_M * stride  # of `last`
    most = first + (tl.minimum(block * BLOCK_M + BLOCK_M, num_queries) - 1) * stride
    end = tl.maximum(tl.minimum(num_keys, most + 1), 0)
    free = tl.maximum(tl.minimum(num_keys, lowest + 1), 0) // BLOCK_N * BLOCK_N
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    keys += shared * key_head
    ropes += shared * rope_head
    values += shared * value_head
    acc, highest, total = _add(
        acc, highest, total, q_main, q_rope, keys, ropes, values, pages, 0, free, num_keys, last,
        key_row, rope_row, value_row, scale, DIM, DIM_PAD, ROPE, ROPE_PAD, VALUE, VALUE_PAD, PAGE,
        BLOCK_N, False, STAGES,
    )  # fmt: skip
    acc, highest, total = _add(
        acc, highest, total, q_main, q_rope, keys, ropes, values, pages, free, end, num_keys, last,
        key_row, rope_row, value_row, scale, DIM, DIM_PAD, ROPE, ROPE_PAD, VALUE, VALUE_PAD, PAGE,
        BLOCK_N, True, STAGES,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    saw = total > 0
    found = tl.where(saw, highest + tl.log2(tl.where(saw, total, 1.0)), -float("inf"))
    place = i.to(tl.int64) * num_heads + h
    target = out + place[:, None] * VALUE + dv[None, :]
    mask = live[:, None] & (dv < VALUE)[None, :]
    if MERGE:
        before = tl.load(lse + place, mask=live, other=-float("inf")) * LOG2_E
        base = tl.maximum(tl.maximum(before, found), -1e30)
        old = tl.exp2(before - base)
        new = tl.exp2(found - base)
        both = tl.where(old + new > 0, old + new, 1.0)
        earlier = tl.load(target, mask=mask, other=0.0)
        acc = earlier * (old / both)[:, None] + acc * (new / both)[:, None]
        found = tl.where(old + new > 0, base + tl.log2(both), -float("inf"))
    tl.store(target, acc, mask=mask)
    if KEEP:
        tl.store(lse + place, found * LN_2, mask=live)


@dataclass(frozen=True, slots=True)
class Tiling:
    block_m: int
    block_n: int
    warps: int
    stages: int


def tiling_of(dim: int, value: int, dtype: torch.dtype, card: Card) -> Tiling:
    """dim, value: padded."""
    if dtype == torch.float32:
        return Tiling(32, 32, 8, 1)
    if dim <= 64:
        return Tiling(64, 64, 4, 3)
    warps = 4 if dim <= 128 else 8
    # Queries, and a key and a value block in each stage.
    room = card.shared_bytes - 128 * dim * dtype.itemsize
    stages = room // (64 * (dim + value) * dtype.itemsize)
    return Tiling(128, 64, warps, min(3, stages)) if stages > 0 else Tiling(64, 32, 4, 1)


@dataclass(frozen=True, slots=True)
class Keys:
    """What a part of a context holds; row r of all three is one token."""

    keys: torch.Tensor  # [rows, num_kv, DIM], DIM may be 0
    values: torch.Tensor  # [rows, num_kv, VALUE]
    # [rows, ROPE] behind every head's own key, or [rows, num_kv, ROPE]
    ropes: torch.Tensor | None = None
    pages: torch.Tensor | None = None  # [P] row pages by position; None: rows are in order
    page_size: int = 0


def attend_causal(
    q: torch.Tensor,  # [M, num_heads, DIM + ROPE]
    part: Keys,
    num_keys: int,  # by position
    first: int,  # query i sees the keys 0 .. first + i · stride of this part; may be negative
    stride: int,
    scale: float,
    out: torch.Tensor,  # [M, num_heads, VALUE], contiguous
    lse: torch.Tensor | None = None,  # [M, num_heads] float32; None: it is not kept
    merges: bool = False,  # out and lse hold an earlier part's result, which is kept
    tiling: Tiling | None = None,
) -> None:
    """Write the attention of each query over the keys it sees to `out`; none: 0 and -inf."""
    num, num_heads, width = q.shape
    if q.stride(-1) != 1:
        q = q.contiguous()
    keys, values, ropes = part.keys, part.values, part.ropes
    num_kv, value = values.shape[1:]
    dim = keys.shape[-1]
    rope = width - dim
    padded = (_padded(dim) if dim else 0) + (_padded(rope) if rope else 0)
    t = tiling or tiling_of(padded, _padded(value), q.dtype, card_of(q.device))
    _causal[(num_heads, triton.cdiv(num, t.block_m))](
        q, keys, values if ropes is None else ropes, values,
        q if part.pages is None else part.pages, out, out if lse is None else lse,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1),
        0 if ropes is None else ropes.stride(0),
        ropes.stride(1) if ropes is not None and ropes.dim() == 3 else 0,
        values.stride(0), values.stride(1),
        num, num_keys, first, stride, num_heads // num_kv, scale * LOG2_E.value,
        DIM=dim, DIM_PAD=_padded(dim), ROPE=rope, ROPE_PAD=_padded(rope),
        VALUE=value, VALUE_PAD=_padded(value),
        PAGE=0 if part.pages is None else part.page_size, MERGE=merges, KEEP=lse is not None,
        BLOCK_M=t.block_m, BLOCK_N=t.block_n, STAGES=t.stages,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


def _padded(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))
