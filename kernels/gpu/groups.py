"""Pairs of token and expert by expert, on the device, and which of them a program takes: the host
waits for nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def _group(
    ids,  # [num_pairs]
    order,  # [num_pairs] int32: the pairs by expert, then as given
    starts,  # [num_experts + 1] int32: where each expert's begin
    num_pairs,
    num_experts,
    CHUNK: tl.constexpr,
):
    expert = tl.program_id(0)
    index = tl.arange(0, CHUNK)
    less = tl.zeros([CHUNK], tl.int32)
    for at in range(0, num_pairs, CHUNK):
        own = tl.load(ids + at + index, mask=at + index < num_pairs, other=num_experts)
        less += (own < expert).to(tl.int32)
    begin = tl.sum(less)
    tl.store(starts + expert, begin)
    for at in range(0, num_pairs, CHUNK):
        own = tl.load(ids + at + index, mask=at + index < num_pairs, other=num_experts)
        is_own = own == expert
        place = begin + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(order + place, at + index, mask=is_own)
        begin += tl.sum(is_own.to(tl.int32))
    if expert == num_experts - 1:
        tl.store(starts + num_experts, begin)


@triton.jit
def tile_of(
    starts,
    num_experts,
    column_tiles,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """This program's (expert, its pairs [begin, end), row tile, column tile); programs with the
    same columns of an expert are neighbours, so that its weights are read once."""
    program = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    first = tl.load(starts + e, mask=e < num_experts, other=0)
    last = tl.load(starts + e + 1, mask=e < num_experts, other=0)
    tiles = (last - first + ROWS - 1) // ROWS
    is_before = tl.cumsum(tiles, axis=0) * column_tiles <= program
    expert = tl.sum(is_before.to(tl.int32))
    within = program - tl.sum(tl.where(is_before, tiles, 0)) * column_tiles
    is_own = e == expert
    row_tiles = tl.maximum(tl.sum(tl.where(is_own, tiles, 0)), 1)
    begin = tl.sum(tl.where(is_own, first, 0))
    end = tl.sum(tl.where(is_own, last, 0))
    return expert, begin, end, within % row_tiles, within // row_tiles


def group(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_ids [T, k] -> the pairs t · k + j by expert [T · k] int32, where each expert's begin
    [num_experts + 1] int32."""
    num_pairs = topk_ids.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=topk_ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    chunk = 1024 if num_pairs <= 1024 else 4096
    _group[(num_experts,)](
        topk_ids.contiguous(), order, starts, num_pairs, num_experts, CHUNK=chunk,
        num_warps=chunk // 512,
    )  # fmt: skip
    return order, starts
