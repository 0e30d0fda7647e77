"""Decode work in equal shares: the key blocks of all queries in one line, cut into as many runs as
there are programs, so that unequal contexts load the device evenly; and the merge of what programs
that share a query found. The division is computed on the device from the counts alone.

A run touches queries in ascending order, so (program + query) numbers the pieces uniquely.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_QUERIES = (16, 128, 1024)  # each a form of every kernel, and seconds to compile
MAX_QUERIES = _QUERIES[-1]  # that one program looks over to find its run


def queries_of(num: int) -> int:
    """What kernels that look over `num` queries are compiled for."""
    return next((size for size in _QUERIES if num <= size), int(triton.next_power_of_2(num)))


@triton.jit
def ends_of(counts, num_queries, BLOCK_N: tl.constexpr, QUERIES: tl.constexpr):
    """[QUERIES] int32: the queries' blocks summed up to each one, itself included."""
    n = tl.arange(0, QUERIES)
    count = tl.load(counts + n, mask=n < num_queries, other=0).to(tl.int32)
    return tl.cumsum((count + BLOCK_N - 1) // BLOCK_N, axis=0)


@triton.jit
def item(vector, n, QUERIES: tl.constexpr):
    """vector[n], 0 for n = -1"""
    return tl.sum(tl.where(tl.arange(0, QUERIES) == n, vector, 0), axis=0)


@triton.jit(do_not_specialize=["num_queries"])
def _merge(
    part_out,  # [num_programs + num_queries, num_heads, width] float32
    part_lse,  # [num_programs + num_queries, num_heads] float32, base 2
    counts,  # [num_queries]
    out,  # [num_queries, num_heads, width]
    num_queries,
    num_programs,
    num_heads,
    width,
    BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    n = tl.program_id(0)
    h = tl.program_id(1)
    ends = ends_of(counts, num_queries, BLOCK_N, QUERIES)
    share = tl.maximum(tl.cdiv(tl.max(ends, axis=0), num_programs), 1)
    begin = item(ends, n - 1, QUERIES)
    end = item(ends, n, QUERIES)
    first = begin // share
    last = (end - 1) // share
    column = tl.arange(0, WIDTH)
    if (end == begin) | (last > first):  # else its one program wrote the result
        highest = -float("inf")
        total = 0.0
        mixed = tl.zeros([WIDTH], tl.float32)
        if end > begin:
            for program in range(first, last + 1):
                piece = (program + n).to(tl.int64) * num_heads + h
                lse = tl.load(part_lse + piece)
                part = tl.load(part_out + piece * width + column, mask=column < width, other=0.0)
                higher = tl.maximum(highest, lse)
                old = tl.exp2(highest - higher)
                new = tl.exp2(lse - higher)
                mixed = mixed * old + part * new
                total = total * old + new
                highest = higher
            mixed = mixed / total
        at = (n.to(tl.int64) * num_heads + h) * width
        tl.store(out + at + column, mixed, mask=column < width)


def merge(
    part_out: torch.Tensor,  # [num_programs + N, H, width] float32
    part_lse: torch.Tensor,  # [num_programs + N, H] float32
    counts: torch.Tensor,  # [N]
    out: torch.Tensor,  # [N, H, width], contiguous
    num_programs: int,
    block_n: int,
) -> None:
    """Complete `out`: queries that several programs shared, and those without keys, which get 0."""
    num, num_heads, width = out.shape
    _merge[(num, num_heads)](
        part_out, part_lse, counts, out, num, num_programs, num_heads, width,
        BLOCK_N=block_n, QUERIES=queries_of(num),
        WIDTH=triton.next_power_of_2(width), num_warps=4 if width >= 256 else 1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pieces"])
def _merge_pieces(
    part_out,  # [pieces, N, H, width] float32
    part_lse,  # [pieces, N, H] float32, base 2
    counts,  # [N]
    out,  # [N, H, width]
    pieces,
    width,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program a query and head. Pieces without keys were not written."""
    h = tl.program_id(0)
    n = tl.program_id(1)
    slot = n.to(tl.int64) * tl.num_programs(0) + h
    blocks = (tl.load(counts + n).to(tl.int32) + BLOCK_N - 1) // BLOCK_N
    column = tl.arange(0, WIDTH)
    highest = -float("inf")
    total = 0.0
    mixed = tl.zeros([WIDTH], tl.float32)
    for piece in range(pieces):
        if blocks * piece // pieces < blocks * (piece + 1) // pieces:
            lse = tl.load(part_lse + slot)
            part = tl.load(part_out + slot * width + column, mask=column < width, other=0.0)
            higher = tl.maximum(highest, lse)
            old = tl.exp2(highest - higher)
            new = tl.exp2(lse - higher)
            mixed = mixed * old + part * new
            total = total * old + new
            highest = higher
        slot += tl.num_programs(0) * tl.num_programs(1)
    slot = n.to(tl.int64) * tl.num_programs(0) + h
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + slot * width + column, mixed, mask=column < width)


def merge_pieces(
    part_out: torch.Tensor,  # [pieces, N, H, width] float32
    part_lse: torch.Tensor,  # [pieces, N, H] float32
    counts: torch.Tensor,  # [N]
    out: torch.Tensor,  # [N, H, width], contiguous
    block_n: int,
) -> None:
    """Complete `out` where each query's blocks were divided into as many pieces, [blocks · i //
    pieces, blocks · (i + 1) // pieces); queries without keys get 0."""
    pieces, num, num_heads, width = part_out.shape
    _merge_pieces[(num_heads, num)](
        part_out, part_lse, counts, out, pieces, width, BLOCK_N=block_n,
        WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
