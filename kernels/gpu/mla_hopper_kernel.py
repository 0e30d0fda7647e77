"""Latent attention on Hopper for latents of 512 and rope keys of 64 in 16 bits: three warp groups
of which one gathers rows while two compute.

An item is 64 heads of one query; its keys come in pairs of blocks of 64. Each computing group
scores one block of a pair, then weighs its half of the latent columns of both. A block's rope keys
are not needed once it is scored: the group's weights go there, for the other group to read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Barriers, by first index; those of a block are two, one for each block of a pair.
Q_READY = gl.constexpr(0)
LEFT_READY = gl.constexpr(1)
RIGHT_READY = gl.constexpr(3)
LEFT_FREE = gl.constexpr(5)
RIGHT_FREE = gl.constexpr(7)
PEAK_READY = gl.constexpr(9)
WEIGHTS_READY = gl.constexpr(11)
TOTAL_READY = gl.constexpr(13)
Q_FREE = gl.constexpr(15)
NUM_BARRIERS = gl.constexpr(16)

# Of a warp group; named so up to Triton 3.6, `barrier` from 3.7 on.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _item(item, counts, num_heads, pieces):
    """(query, first head, live heads, piece, keys [begin, end)) of one item of the work."""
    tiles = (num_heads + 63) // 64
    n = item // (tiles * pieces)
    piece = item // tiles % pieces
    head = item % tiles * 64
    count = gl.load(counts + n).to(gl.int32)
    blocks = (count + 127) // 128
    begin = blocks * piece // pieces * 128
    end = gl.minimum(blocks * (piece + 1) // pieces * 128, count)
    return n, head, gl.minimum(num_heads - head, 64), piece, begin, end


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
    q, cache, index, counts, q_query, q_head, cache_row, index_query, num_heads, items, pieces,
    q_left, q_right, q_rope, left, right, rope, bars,
    PAGE: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    wide = gl.arange(0, 256, layout=by_column)[None, :]
    narrow = gl.arange(0, 64, layout=by_column)[None, :]
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    pairs_done = 0
    items_done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, head, live, _, begin, end = _item(item, counts, num_heads, pieces)
        # Keys past the end are read as the last one, and never counted. Rows are looked up a pair
        # ahead; halves are filled in the order in which the computing groups leave them.
        own = index + n.to(gl.int64) * index_query
        last = end - 1
        pairs = (end - begin + 127) // 128
        if pairs > 0:
            row0 = _row(own, gl.minimum(begin + lane, last), PAGE)
            row1 = _row(own, gl.minimum(begin + 64 + lane, last), PAGE)
            h = head + gl.minimum(lane, live - 1)
            at = q + n.to(gl.int64) * q_query + (h * q_head)[:, None]
            mbarrier.wait(bars.index(Q_FREE), (items_done & 1) ^ 1)
            async_copy.async_copy_global_to_shared(q_left.index(0), at + wide)
            async_copy.async_copy_global_to_shared(q_right.index(0), at + 256 + wide)
            async_copy.async_copy_global_to_shared(q_rope.index(0), at + 512 + narrow)
            async_copy.mbarrier_arrive(bars.index(Q_READY), increment_count=False)
            for t in range(pairs):
                phase = ((pairs_done + t) & 1) ^ 1
                place0 = cache + (row0 * cache_row)[:, None]
                place1 = cache + (row1 * cache_row)[:, None]
                row0 = _row(own, gl.minimum(begin + (2 * t + 2) * 64 + lane, last), PAGE)
                row1 = _row(own, gl.minimum(begin + (2 * t + 3) * 64 + lane, last), PAGE)
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
            pairs_done += pairs
            items_done += 1
    async_copy.wait_group(0)


@gluon.jit
def _score(phase, none, q_left, q_right, q_rope, left, right, rope, bars, J: gl.constexpr):
    """[64 heads, 64 keys] of block J of a pair, unscaled."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    s = gl.zeros([64, 64], gl.float32, layout)
    if J == 0:
        mbarrier.wait(bars.index(LEFT_READY + J), phase)
        fence_async_shared()
        s = warpgroup_mma(
            q_left.index(none),
            left.index(J + none).permute((1, 0)),
            s,
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(bars.index(RIGHT_READY + J), phase)
        fence_async_shared()
        s = warpgroup_mma(
            q_right.index(none), right.index(J + none).permute((1, 0)), s, is_async=True
        )
    else:
        mbarrier.wait(bars.index(RIGHT_READY + J), phase)
        fence_async_shared()
        s = warpgroup_mma(
            q_right.index(none),
            right.index(J + none).permute((1, 0)),
            s,
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(bars.index(LEFT_READY + J), phase)
        fence_async_shared()
        s = warpgroup_mma(
            q_left.index(none), left.index(J + none).permute((1, 0)), s, is_async=True
        )
    s = warpgroup_mma(q_rope.index(none), rope.index(J + none).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _arrive(bars, i: gl.constexpr):
    """This warp group has finished what the barrier stands for."""
    thread_barrier()
    mbarrier.arrive(bars.index(i), count=1)


@gluon.jit
def _weigh(
    length, scale, pairs_done,
    q_left, q_right, q_rope, left, right, rope, peaks, bars,
    J: gl.constexpr,
):  # fmt: skip
    """(weighted latent columns of this group [64, 256], its share of the weights' sum [64], the
    peak of all scores [64], base 2) over an item's keys."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
    peak = gl.full([64], -float("inf"), gl.float32, row)
    total = gl.zeros([64], gl.float32, row)
    o = gl.zeros([64, 256], gl.float32, o_layout)
    # Whose latent columns this group weighs, and what it frees them by.
    values = left if J == 0 else right
    free: gl.constexpr = LEFT_FREE if J == 0 else RIGHT_FREE
    for t in range((length + 127) // 128):
        phase = (pairs_done + t) & 1
        # Always 0, which the compiler cannot know: it would keep every address of the shared memory
        # that is read below in a register from before the loop, and has not that many.
        none = t >> 30
        s = _score(phase, none, q_left, q_right, q_rope, left, right, rope, bars, J)
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
                gl.convert_layout(weights, a_layout), values.index(none), o, is_async=True
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
            o = warpgroup_mma(rope.index(1 + none), values.index(1 + none), o, is_async=True)
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
                gl.convert_layout(weights, a_layout), values.index(1 + none), o, is_async=True
            )
            total = total * old + gl.sum(p, axis=1)
            mbarrier.wait(bars.index(WEIGHTS_READY), phase)
            fence_async_shared()
            o = warpgroup_mma(rope.index(none), values.index(none), o, is_async=True)
            o = warpgroup_mma_wait(1, deps=[o])
            _arrive(bars, free + 1)
            o = warpgroup_mma_wait(0, deps=[o])
            _arrive(bars, free)
    return o, total, peak


@gluon.jit
def _consume(
    counts, out, lse, num_queries, num_heads, items, pieces, scale,
    q_left, q_right, q_rope, left, right, rope, peaks, totals, bars,
    J: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    row: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    pairs_done = 0
    items_done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, head, live, piece, begin, end = _item(item, counts, num_heads, pieces)
        slot = (piece * num_queries + n).to(gl.int64) * num_heads + head
        if begin < end:
            mbarrier.wait(bars.index(Q_READY), items_done & 1)
            o, total, peak = _weigh(
                end - begin, scale, pairs_done, q_left, q_right, q_rope, left, right, rope, peaks,
                bars, J,
            )  # fmt: skip
            _arrive(bars, Q_FREE)
            # The groups' sums are on one scale: that of the last pair's peak.
            totals.index(J).store(total)
            _arrive(bars, TOTAL_READY + J)
            mbarrier.wait(bars.index(TOTAL_READY + 1 - J), items_done & 1)
            total += totals.index(1 - J).load(row)
            o = o / gl.convert_layout(total, o_row)[:, None]
            lane = gl.arange(0, 64, layout=o_row)
            column = J * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, o_layout))
            at = out + slot * 512 + lane[:, None] * 512 + column[None, :]
            gl.store(at, o.to(out.dtype.element_ty), mask=(lane < live)[:, None])
            if PARTIAL and J == 0:
                h = gl.arange(0, 64, layout=row)
                gl.store(lse + slot + h, peak + gl.log2(total), mask=h < live)
            pairs_done += (end - begin + 127) // 128
            items_done += 1
        elif pieces == 1:  # a query without keys; else the merge sees to it
            lane = gl.arange(0, 64, layout=o_row)
            column = J * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, o_layout))
            at = out + slot * 512 + lane[:, None] * 512 + column[None, :]
            zero = gl.zeros([64, 256], out.dtype.element_ty, o_layout)
            gl.store(at, zero, mask=(lane < live)[:, None])
            if PARTIAL and J == 0:
                h = gl.arange(0, 64, layout=row)
                nothing = gl.full([64], -float("inf"), gl.float32, row)
                gl.store(lse + slot + h, nothing, mask=h < live)


@gluon.jit(do_not_specialize=["num_queries", "items", "pieces"])
def attend(
    q,  # [N, H, 576]
    cache,  # [rows, 576]
    index,  # [N, width] rows, or pages where PAGE > 0
    counts,  # [N]
    out,  # [N, H, 512], or float32 [pieces, N, H, 512] where PARTIAL
    lse,  # float32 [pieces, N, H]
    q_query, q_head, cache_row, index_query,  # strides
    num_queries, num_heads, items, pieces, scale,
    PAGE: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """A program a share of the items (query, piece, tile of heads)."""
    if not PARTIAL:
        pieces = 1
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(dtype, [1, 64, 256], wide)
    q_right = gl.allocate_shared_memory(dtype, [1, 64, 256], wide)
    q_rope = gl.allocate_shared_memory(dtype, [1, 64, 64], narrow)
    left = gl.allocate_shared_memory(dtype, [2, 64, 256], wide)
    right = gl.allocate_shared_memory(dtype, [2, 64, 256], wide)
    rope = gl.allocate_shared_memory(dtype, [2, 64, 64], narrow)
    peaks = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LEFT_FREE):  # these count the arrivals of each thread's copies
        mbarrier.init(bars.index(i), count=128)
    for i in gl.static_range(LEFT_FREE, Q_FREE):
        mbarrier.init(bars.index(i), count=1)
    mbarrier.init(bars.index(Q_FREE), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                counts, out, lse, num_queries, num_heads, items, pieces, scale,
                q_left, q_right, q_rope, left, right, rope, peaks, totals, bars, 0, PARTIAL,
            )),
            (_consume, (
                counts, out, lse, num_queries, num_heads, items, pieces, scale,
                q_left, q_right, q_rope, left, right, rope, peaks, totals, bars, 1, PARTIAL,
            )),
            (_produce, (
                q, cache, index, counts, q_query, q_head, cache_row, index_query, num_heads,
                items, pieces, q_left, q_right, q_rope, left, right, rope, bars, PAGE,
            )),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip
