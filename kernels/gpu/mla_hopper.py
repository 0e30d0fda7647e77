"""Latent attention on Hopper for latents of 512 and rope keys of 64 in 16 bits: three warp groups
of which one gathers rows while two compute. The specification is kernels.attention; kernels.gpu.mla
takes what this does not.

A program has 64 heads of one query and keys in pairs of blocks of 64. Each computing group scores
one block of a pair, then weighs its half of the latent columns of both. A block's rope keys are
not needed once it is scored: the group's weights go there, for the other group to read.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gpu.shares import merge_pieces

LOG2_E = 1.4426950408889634
# Barriers, by first index; two of each kind but the first: one a block of the pair.
Q_READY = gl.constexpr(0)
LEFT_READY = gl.constexpr(1)
RIGHT_READY = gl.constexpr(3)
LEFT_FREE = gl.constexpr(5)
RIGHT_FREE = gl.constexpr(7)
PEAK_READY = gl.constexpr(9)
WEIGHTS_READY = gl.constexpr(11)
NUM_BARRIERS = gl.constexpr(13)


@gluon.jit
def _row(index, key, PAGE: gl.constexpr):
    """Cache row, int64, of each key [64]."""
    if PAGE > 0:
        row = gl.load(index + key // PAGE).to(gl.int64) * PAGE + key % PAGE
    else:
        row = gl.load(index + key).to(gl.int64)
    return row


@gluon.jit
def _produce(
    q, cache, index, first_key, end_key, num_live, q_head, cache_row,
    q_left, q_right, q_rope, left, right, rope, bars,
    PAGE: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    wide = gl.arange(0, 256, layout=by_column)[None, :]
    narrow = gl.arange(0, 64, layout=by_column)[None, :]
    lane = gl.arange(0, 64, layout=by_row)
    head = gl.minimum(lane, num_live - 1)
    at = q + head[:, None] * q_head
    async_copy.async_copy_global_to_shared(q_left, at + wide)
    async_copy.async_copy_global_to_shared(q_right, at + 256 + wide)
    async_copy.async_copy_global_to_shared(q_rope, at + 512 + narrow)
    async_copy.mbarrier_arrive(bars.index(Q_READY), increment_count=False)
    pairs = (end_key - first_key + 127) // 128
    # Keys past the end are read as the last one, and never counted. Rows are looked up a pair
    # ahead; halves are filled in the order in which the computing groups leave them.
    last = end_key - 1
    row0 = _row(index, gl.minimum(first_key + lane, last), PAGE)
    row1 = _row(index, gl.minimum(first_key + 64 + lane, last), PAGE)
    for t in range(pairs):
        phase = (t & 1) ^ 1
        place0 = cache + (row0 * cache_row)[:, None]
        place1 = cache + (row1 * cache_row)[:, None]
        row0 = _row(index, gl.minimum(first_key + (2 * t + 2) * 64 + lane, last), PAGE)
        row1 = _row(index, gl.minimum(first_key + (2 * t + 3) * 64 + lane, last), PAGE)
        mbarrier.wait(bars.index(LEFT_FREE), phase)
        async_copy.async_copy_global_to_shared(left.index(0), place0 + wide)
        async_copy.mbarrier_arrive(bars.index(LEFT_READY), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE + 1), phase)
        async_copy.async_copy_global_to_shared(right.index(1), place1 + 256 + wide)
        async_copy.mbarrier_arrive(bars.index(RIGHT_READY + 1), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE), phase)
        async_copy.async_copy_global_to_shared(right.index(0), place0 + 256 + wide)
        async_copy.async_copy_global_to_shared(rope.index(0), place0 + 512 + narrow)
        async_copy.mbarrier_arrive(bars.index(RIGHT_READY), increment_count=False)
        mbarrier.wait(bars.index(LEFT_FREE + 1), phase)
        async_copy.async_copy_global_to_shared(left.index(1), place1 + wide)
        async_copy.async_copy_global_to_shared(rope.index(1), place1 + 512 + narrow)
        async_copy.mbarrier_arrive(bars.index(LEFT_READY + 1), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _score(t, q_left, q_right, q_rope, left, right, rope, bars, J: gl.constexpr):
    """[64 heads, 64 keys] of block J of pair t, unscaled."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    phase = t & 1
    s = gl.zeros([64, 64], gl.float32, layout)
    if J == 0:
        mbarrier.wait(bars.index(LEFT_READY + J), phase)
        fence_async_shared()
        s = warpgroup_mma(q_left, left.index(J).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(bars.index(RIGHT_READY + J), phase)
        fence_async_shared()
        s = warpgroup_mma(q_right, right.index(J).permute((1, 0)), s, is_async=True)
    else:
        mbarrier.wait(bars.index(RIGHT_READY + J), phase)
        fence_async_shared()
        s = warpgroup_mma(q_right, right.index(J).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(bars.index(LEFT_READY + J), phase)
        fence_async_shared()
        s = warpgroup_mma(q_left, left.index(J).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_rope, rope.index(J).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _arrive(bars, i: gl.constexpr):
    """This warp group has finished what the barrier stands for."""
    gl.thread_barrier()
    mbarrier.arrive(bars.index(i), count=1)


@gluon.jit
def _consume(
    first_key, end_key, scale,
    q_left, q_right, q_rope, left, right, rope, peaks, bars,
    out, lse, num_live,
    J: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
    lowest = gl.full([64], -float("inf"), gl.float32, row)
    peak = lowest  # of both groups' scores so far, scaled
    total = gl.zeros([64], gl.float32, row)
    o = gl.zeros([64, 256], gl.float32, o_layout)
    length = end_key - first_key
    pairs = (length + 127) // 128
    # Whose latent columns this group weighs, and what it frees them by.
    values = left if J == 0 else right
    free: gl.constexpr = LEFT_FREE if J == 0 else RIGHT_FREE
    mbarrier.wait(bars.index(Q_READY), 0)
    for t in range(pairs):
        phase = t & 1
        s = _score(t, q_left, q_right, q_rope, left, right, rope, bars, J)
        begin = (2 * t + J) * 64
        if begin + 64 > length:
            s = gl.where((begin + column < length)[None, :], s, -float("inf"))
        own = gl.max(s, axis=1) * scale
        if J == 0:
            # The other group's peak of the last pair is its own too; its next one builds on this.
            new = gl.maximum(peak, own)
            peaks.index(0).store(new)
            _arrive(bars, PEAK_READY)
            p = gl.exp2(s * scale - new[:, None])
            old = gl.exp2(peak - new)
            weights = p.to(q_left.dtype)
            o = o * gl.convert_layout(old, o_row)[:, None]
            o = warpgroup_mma(
                gl.convert_layout(weights, a_layout), values.index(0), o, is_async=True
            )
            mbarrier.wait(bars.index(PEAK_READY + 1), phase)
            peak = peaks.index(1).load(row)
            down = gl.exp2(new - peak)
            p = p * down[:, None]
            rope.index(0).store(p.to(q_left.dtype))
            fence_async_shared()
            _arrive(bars, WEIGHTS_READY)
            total = total * (old * down) + gl.sum(p, axis=1)
            o = warpgroup_mma_wait(0, deps=[o])
            _arrive(bars, free)
            o = o * gl.convert_layout(down, o_row)[:, None]
            mbarrier.wait(bars.index(WEIGHTS_READY + 1), phase)
            fence_async_shared()
            o = warpgroup_mma(rope.index(1), values.index(1), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            _arrive(bars, free + 1)
        else:
            mbarrier.wait(bars.index(PEAK_READY), phase)
            new = gl.maximum(peaks.index(0).load(row), own)
            peaks.index(1).store(new)
            _arrive(bars, PEAK_READY + 1)
            p = gl.exp2(s * scale - new[:, None])
            old = gl.exp2(peak - new)
            peak = new
            weights = p.to(q_left.dtype)
            rope.index(1).store(weights)
            fence_async_shared()
            _arrive(bars, WEIGHTS_READY + 1)
            o = o * gl.convert_layout(old, o_row)[:, None]
            o = warpgroup_mma(
                gl.convert_layout(weights, a_layout), values.index(1), o, is_async=True
            )
            total = total * old + gl.sum(p, axis=1)
            mbarrier.wait(bars.index(WEIGHTS_READY), phase)
            fence_async_shared()
            o = warpgroup_mma(rope.index(0), values.index(0), o, is_async=True)
            o = warpgroup_mma_wait(1, deps=[o])
            _arrive(bars, free + 1)
            o = warpgroup_mma_wait(0, deps=[o])
            _arrive(bars, free)
    # Both groups' totals are on the same scale now: that of the last pair's peak.
    phase = pairs & 1
    peaks.index(J).store(total)
    _arrive(bars, PEAK_READY + J)
    mbarrier.wait(bars.index(PEAK_READY + 1 - J), phase)
    total += peaks.index(1 - J).load(row)
    o = o / gl.convert_layout(total, o_row)[:, None]
    head = gl.arange(0, 64, layout=o_row)
    column = gl.arange(0, 256, gl.SliceLayout(0, o_layout))
    at = head[:, None] * 512 + J * 256 + column[None, :]
    gl.store(out + at, o.to(out.dtype.element_ty), mask=(head < num_live)[:, None])
    if PARTIAL and J == 0:
        head = gl.arange(0, 64, layout=row)
        gl.store(lse + head, peak + gl.log2(total), mask=head < num_live)


@gluon.jit
def _attend(
    q,  # [N, H, 576]
    cache,  # [rows, 576]
    index,  # [N, width] rows, or pages where PAGE > 0
    counts,  # [N]
    out,  # [N, H, 512], or float32 [pieces, N, H, 512] where PARTIAL
    lse,  # float32 [pieces, N, H]
    q_query, q_head, cache_row, index_query,  # strides
    num_heads, scale,
    PAGE: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile = gl.program_id(0)
    piece = gl.program_id(1)
    n = gl.program_id(2)
    count = gl.load(counts + n).to(gl.int32)
    blocks = (count + 127) // 128
    pieces = gl.num_programs(1)
    first_key = blocks * piece // pieces * 128
    end_key = gl.minimum(blocks * (piece + 1) // pieces * 128, count)
    num_live = gl.minimum(num_heads - tile * 64, 64)
    slot = (piece * gl.num_programs(2) + n).to(gl.int64) * num_heads + tile * 64
    out += slot * 512
    lse += slot
    if first_key < end_key:
        q_left = gl.allocate_shared_memory(dtype, [64, 256], wide)
        q_right = gl.allocate_shared_memory(dtype, [64, 256], wide)
        q_rope = gl.allocate_shared_memory(dtype, [64, 64], narrow)
        left = gl.allocate_shared_memory(dtype, [2, 64, 256], wide)
        right = gl.allocate_shared_memory(dtype, [2, 64, 256], wide)
        rope = gl.allocate_shared_memory(dtype, [2, 64, 64], narrow)
        peaks = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
        bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(5):  # arrivals of each thread's copies
            mbarrier.init(bars.index(i), count=128)
        for i in gl.static_range(5, 13):
            mbarrier.init(bars.index(i), count=1)
        q += n.to(gl.int64) * q_query + tile * 64 * q_head
        index += n.to(gl.int64) * index_query
        gl.warp_specialize(
            [
                (_consume, (
                    first_key, end_key, scale, q_left, q_right, q_rope, left, right, rope, peaks,
                    bars, out, lse, num_live, 0, PARTIAL,
                )),
                (_consume, (
                    first_key, end_key, scale, q_left, q_right, q_rope, left, right, rope, peaks,
                    bars, out, lse, num_live, 1, PARTIAL,
                )),
                (_produce, (
                    q, cache, index, first_key, end_key, num_live, q_head, cache_row,
                    q_left, q_right, q_rope, left, right, rope, bars, PAGE,
                )),
            ],
            [4, 4],
            [216, 72],
        )  # fmt: skip
    elif not PARTIAL:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        head = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
        at = head * 512 + gl.arange(0, 512, layout=gl.SliceLayout(0, layout))[None, :]
        zero = gl.zeros([64, 512], gl.float32, layout).to(out.dtype.element_ty)
        gl.store(out + at, zero, mask=head < num_live)


def takes(q: torch.Tensor, cache: torch.Tensor, latent_dim: int) -> bool:
    """Whether a call has this file's geometry, and enough heads to fill its tiles."""
    fits = latent_dim == 512 and q.shape[2] == cache.shape[1] == 576 and q.shape[1] > 32
    return fits and q.dtype in (torch.bfloat16, torch.float16) and q.stride(2) == 1


def mla_latents(
    q: torch.Tensor,  # [N, H, 576]
    cache: torch.Tensor,  # [rows, 576]
    index: torch.Tensor,  # [N, K] rows, or [N, P] pages
    counts: torch.Tensor,  # [N]
    page_size: int,  # 0: the index holds rows
    scale: float,
    num_processors: int,
    pieces: int | None = None,
) -> torch.Tensor:  # [N, H, 512] in q's dtype
    num, num_heads, _ = q.shape
    out = q.new_empty(num, num_heads, 512)
    tiles = triton.cdiv(num_heads, 64)
    if pieces is None:
        most = triton.cdiv(index.shape[1] * max(page_size, 1), 128)
        pieces = max(1, min(most, num_processors // (tiles * num)))
    strides = (q.stride(0), q.stride(1), cache.stride(0), index.stride(0))
    scale *= LOG2_E
    grid = (tiles, pieces, num)
    if pieces == 1:
        _attend[grid](
            q, cache, index, counts, out, out, *strides, num_heads, scale, page_size, False,
            num_warps=4,
        )  # fmt: skip
        return out
    part_out = torch.empty(pieces, num, num_heads, 512, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(pieces, num, num_heads, dtype=torch.float32, device=q.device)
    _attend[grid](
        q, cache, index, counts, part_out, part_lse, *strides, num_heads, scale, page_size, True,
        num_warps=4,
    )  # fmt: skip
    merge_pieces(part_out, part_lse, counts, out, 128)
    return out
