"""Index scores from paged keys. The specification is kernels.index_logits.

Keys are the rows of the product and (query, head) its columns, so that the sum over heads runs
mostly inside a thread. Scores of tokens that a query may not see are left unwritten. Keys in fp8
are multiplied so where the card's tensor cores can, else as float16, which is exact too; their
scales come last, once a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.fp8_keys import Fp8Keys, IndexKeys
from kernels.gpu.card import card_of
from kernels.gpu.fp8 import decode
from kernels.gpu.index_tiles import Tile, causal_tile, paged_tile
from kernels.gpu.shares import queries_of


@triton.jit
def _scores(
    q,  # [COLUMNS, DIM]: query-major, heads padded to HEADS
    w,  # [COLUMNS] float32, 0 for padding
    keys,  # row r at (r // PAGE) · page_stride + (r % PAGE) · dim
    scales,  # row r's at (r // PAGE) · scale_stride + r % PAGE; read where SCALED
    pages,  # row pages of the context
    at,  # first position of this block
    limit,  # positions from here on are not read
    dim,
    page_stride,
    scale_stride,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    WITHIN_PAGE: tl.constexpr,  # a block lies in one page
    EVEN_DIM: tl.constexpr,  # dim == DIM
    SCALED: tl.constexpr,  # keys and queries are in e4m3
    DECODED: tl.constexpr,  # they are multiplied in float16; q is so already
):  # [KEYS, QUERIES] float32
    inside = tl.arange(0, KEYS)
    d = tl.arange(0, DIM)
    if WITHIN_PAGE:
        # All rows of a page exist; what lies past the context is read and then not stored.
        page = tl.load(pages + at // PAGE).to(tl.int64)
        first = keys + page * page_stride + at % PAGE * dim
        address = first + inside[:, None] * dim + d[None, :]
        if EVEN_DIM:
            k = tl.load(address)
        else:
            k = tl.load(address, mask=(d < dim)[None, :], other=0.0)
        if SCALED:
            scale = tl.load(scales + page * scale_stride + at % PAGE + inside)
    else:
        position = at + inside
        seen = position < limit
        page = tl.load(pages + position // PAGE, mask=seen, other=0).to(tl.int64)
        row = page * page_stride + position % PAGE * dim
        mask = seen[:, None] & (d < dim)[None, :]
        k = tl.load(keys + row[:, None] + d[None, :], mask=mask, other=0.0)
        if SCALED:
            scale = tl.load(scales + page * scale_stride + position % PAGE, mask=seen, other=0.0)
    if DECODED:
        k = decode(k)
    products = tl.dot(k, tl.trans(q), input_precision="ieee")  # [KEYS, COLUMNS]
    weighted = tl.maximum(products, 0.0) * w[None, :]
    found = tl.sum(tl.reshape(weighted, [KEYS, QUERIES, HEADS]), axis=2)
    if SCALED:
        found *= scale[:, None]
    return found


@triton.jit(do_not_specialize=["num_queries", "start"])
def _causal(
    q,  # [num_queries, heads, dim]
    weights,  # [num_queries, heads] float32
    keys,
    scales,
    pages,  # [P] int32
    out,  # [num_queries, out_stride] float32
    num_queries,
    heads,
    dim,
    start,  # position of the first query
    least,  # a query that sees no more tokens is not scored
    span,  # positions of one program, a multiple of KEYS
    q_stride,
    q_head_stride,
    w_stride,
    out_stride,
    page_stride,
    scale_stride,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    WITHIN_PAGE: tl.constexpr,
    EVEN_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    DECODED: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * QUERIES
    begin = tl.program_id(1) * span
    last = tl.minimum(first + QUERIES, num_queries)
    limit = tl.minimum(start + last, begin + span)
    if (begin >= limit) | (start + last <= least):
        return
    column = tl.arange(0, QUERIES * HEADS)
    query, head = first + column // HEADS, column % HEADS
    real = (query < num_queries) & (head < heads)
    d = tl.arange(0, DIM)
    address = q + query[:, None].to(tl.int64) * q_stride + head[:, None] * q_head_stride
    own = tl.load(address + d[None, :], mask=real[:, None] & (d < dim)[None, :], other=0.0)
    if DECODED:
        own = decode(own)
    w = tl.load(weights + query.to(tl.int64) * w_stride + head, mask=real, other=0.0)
    target = first + tl.arange(0, QUERIES)
    rows = out + target.to(tl.int64) * out_stride  # [QUERIES]
    for at in tl.range(begin, limit, KEYS, num_stages=STAGES):
        scores = _scores(
            own, w, keys, scales, pages, at, limit, dim, page_stride, scale_stride,
            QUERIES, HEADS, DIM, KEYS, PAGE, WITHIN_PAGE, EVEN_DIM, SCALED, DECODED,
        )  # fmt: skip
        position = at + tl.arange(0, KEYS)
        mask = (position < limit)[:, None] & (target < num_queries)[None, :]
        tl.store(rows[None, :] + position[:, None], scores, mask=mask)


@triton.jit(do_not_specialize=["num"])
def _paged(
    q,  # [num, heads, dim]
    weights,  # [num, heads] float32
    keys,
    scales,
    pages,  # [num, P] int32
    counts,  # [num]
    out,  # [num, out_stride] float32
    num,
    heads,
    dim,
    least,
    span,  # positions of an item, a multiple of KEYS
    q_stride,
    q_head_stride,
    w_stride,
    table_stride,
    out_stride,
    page_stride,
    scale_stride,
    NUM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    WITHIN_PAGE: tl.constexpr,
    EVEN_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    DECODED: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The spans of all contexts are numbered through and dealt out, however unequal they are.
    n = tl.arange(0, NUM)
    count = tl.load(counts + n, mask=n < num, other=0).to(tl.int32)
    spans = tl.where(count > least, (count + span - 1) // span, 0)
    ends = tl.cumsum(spans, axis=0)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    for item in range(tl.program_id(0), tl.sum(spans), tl.num_programs(0)):
        before = ends <= item
        row = tl.sum(before.to(tl.int32)).to(tl.int64)
        begin = (item - tl.sum(tl.where(before, spans, 0))) * span
        limit = tl.minimum(tl.sum(tl.where(n == row, count, 0)), begin + span)
        source = q + row * q_stride + head[:, None] * q_head_stride + d[None, :]
        own = tl.load(source, mask=(head < heads)[:, None] & (d < dim)[None, :], other=0.0)
        if DECODED:
            own = decode(own)
        w = tl.load(weights + row * w_stride + head, mask=head < heads, other=0.0)
        for at in tl.range(begin, limit, KEYS, num_stages=STAGES):
            scores = _scores(
                own, w, keys, scales, pages + row * table_stride, at, limit, dim,
                page_stride, scale_stride,
                1, HEADS, DIM, KEYS, PAGE, WITHIN_PAGE, EVEN_DIM, SCALED, DECODED,
            )  # fmt: skip
            position = at + tl.arange(0, KEYS)
            target = out + row * out_stride + position[:, None]
            tl.store(target, scores, mask=(position < limit)[:, None])


def causal(
    q: torch.Tensor,  # [M, H, D]; e4m3 where the keys are
    weights: torch.Tensor,  # [M, H] float32
    keys: IndexKeys,  # [rows, D]
    pages: torch.Tensor,  # [P] int32
    start: int,
    page_size: int,
    out: torch.Tensor,  # [M, >= start + M] float32
    least: int = 0,
    tile: Tile | None = None,
    native: bool | None = None,  # multiply e4m3 as it is; None: where the card does
) -> None:
    """out[i, s] for s <= start + i is query i's score of position s; queries that see no more than
    `least` tokens may be left out."""
    num_queries, heads, dim = q.shape
    tile = tile or causal_tile(heads, dim, q.dtype, card_of(q.device))
    held = _hold(q, keys, page_size, native)
    grid = (triton.cdiv(num_queries, tile.queries), triton.cdiv(start + num_queries, tile.span))
    _causal[grid](
        held.q, weights, held.keys, held.scales, pages, out, num_queries, heads, dim, start, least,
        tile.span, q.stride(0), q.stride(1), weights.stride(0), out.stride(0),
        held.page_stride, held.scale_stride, QUERIES=tile.queries, SCALED=held.is_scaled,
        DECODED=held.is_decoded, **tile.constants(heads, dim, page_size),
    )  # fmt: skip


def paged(
    q: torch.Tensor,  # [N, H, D]; e4m3 where the keys are
    weights: torch.Tensor,  # [N, H] float32
    keys: IndexKeys,  # [rows, D]
    pages: torch.Tensor,  # [N, P] int32
    counts: torch.Tensor,  # [N]
    page_size: int,
    out: torch.Tensor,  # [N, >= P · page_size] float32
    num_programs: int,
    least: int = 0,
    tile: Tile | None = None,
    native: bool | None = None,  # multiply e4m3 as it is; None: where the card does
) -> None:
    """out[n, s] for s < counts[n] is query n's score of position s; queries that see no more than
    `least` tokens may be left out."""
    num, heads, dim = q.shape
    tile = tile or paged_tile(num, heads, dim, q.dtype, card_of(q.device))
    held = _hold(q, keys, page_size, native)
    most = num * triton.cdiv(pages.shape[1] * page_size, tile.span)
    _paged[(min(num_programs, most),)](
        held.q, weights, held.keys, held.scales, pages, counts, out, num, heads, dim, least,
        tile.span, q.stride(0), q.stride(1), weights.stride(0), pages.stride(0), out.stride(0),
        held.page_stride, held.scale_stride, NUM=queries_of(num),
        SCALED=held.is_scaled, DECODED=held.is_decoded,
        **tile.constants(heads, dim, page_size),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Held:
    """Queries and keys as a kernel takes them. Strides are in elements of what they belong to."""

    q: torch.Tensor
    keys: torch.Tensor
    scales: torch.Tensor
    page_stride: int
    scale_stride: int
    is_scaled: bool
    is_decoded: bool


def _hold(q: torch.Tensor, keys: IndexKeys, page_size: int, native: bool | None) -> _Held:
    if not isinstance(keys, Fp8Keys):
        return _Held(q, keys, keys, page_size * q.shape[2], 0, False, False)
    if native is None:
        native = card_of(q.device).multiplies_fp8
    codes, scales = keys.codes, keys.scales
    strides = codes.stride(0), scales.stride(0)
    if native:
        return _Held(q, codes.view(q.dtype), scales, *strides, True, False)
    return _Held(q.view(torch.uint8), codes, scales, *strides, True, True)
