"""What a row's k best very probably reach, and all of the row that reaches it, with its positions.
How many of the best are in a sample says it; how many are kept shows where the sample was wrong."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.kth import NOTHING, key_of, kth, number, shared_counts
from kernels.gpu.pieces import fours, places, places_of_warps, quarters, read, spread, store


@triton.jit
def _pair(x, position):
    """float32 and int32 as one int64"""
    return x.to(tl.int32, bitcast=True).to(tl.int64) << 32 | position.to(tl.int64)


@triton.jit
def parts(pair):
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), pair.to(tl.int32)


@triton.jit
def _reach(a, b, c, d, least):
    """How many of each four do."""
    ones = tl.where(a >= least, 1.0, 0.0) + tl.where(b >= least, 1.0, 0.0)
    ones += tl.where(c >= least, 1.0, 0.0) + tl.where(d >= least, 1.0, 0.0)
    return ones.to(tl.int32)


@triton.jit
def _keep(to, x, position, least, place, CAP: tl.constexpr):
    """Store the pairs of those that reach `least`. Where there are too many, the last four places
    are taken by all."""
    a, b, c, d = quarters(x)
    i, j, m, p = a >= least, b >= least, c >= least, d >= least
    a, b, c, d = quarters(_pair(x, position))
    store(to, a, b, c, d, i, j, m, p, tl.minimum(place, CAP - 4))


@triton.jit
def kept_at(at, counts, CAP: tl.constexpr, SPANS: tl.constexpr):
    """Where the `at`-th of what the sieve kept of a row lies, every span rounded up to whole fours
    and CAP behind the one before; how many there are, and how many with the rounding."""
    where = at
    num = tl.load(counts) * 0
    num_rounded = num
    for span in tl.static_range(SPANS):
        where = tl.where(at >= num_rounded, at - num_rounded + span * CAP, where)
        more = tl.load(counts + span)
        num += more
        num_rounded += (more + 3) // 4 * 4
    return where, num, num_rounded


@triton.jit(do_not_specialize=["k"])
def sieve(
    scores,  # [rows, score_stride] float32
    counts,  # [rows]
    kept,  # [rows, SPANS, CAP] int64
    kept_counts,  # [rows, SPANS]: how many there were to keep, which may be more
    k,
    score_stride,
    CAP: tl.constexpr,  # also of a row; rows with no more scores are left alone
    SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    SAMPLE_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    n = tl.load(counts + row).to(tl.int32)
    if n <= CAP:
        return
    source = scores + row * score_stride
    sample: tl.constexpr = SAMPLE_ROWS * WARPS * 128
    seen_at = 4 * spread(fours(SAMPLE_ROWS, WARPS) // 4, n // 4, sample // 4)
    seen = tl.load(source + tl.multiple_of(seen_at, [1, 1, 1, 4]) + tl.arange(0, 4))
    # The k best, and as many as there is room for, have this many in the sample, give or take the
    # root, or more than the root, as neighbours are alike. Halfway between the roots, a miss of
    # either is as unlikely.
    expected = k.to(tl.float32) * sample / n.to(tl.float32)
    most = CAP * sample / n.to(tl.float32)
    root = (tl.sqrt(expected) + tl.sqrt(most)) * 0.5
    rank = tl.minimum(root * root, expected + 7.5 * tl.sqrt(expected) + 5.0).to(tl.int32)
    least = (n * 0).to(tl.uint32)
    if rank < sample:
        shared = shared_counts(n * 0)
        size = rank * 0 + sample
        least, _, _ = kth(
            shared, key_of(seen), source, seen_at, size, rank, rank // 16, IS_LONG=False
        )
    t = number(tl.maximum(least, NOTHING + 1))
    share = tl.cdiv(tl.cdiv(n, SPANS), 4) * 4
    begin = span * share
    end = tl.maximum(tl.minimum(begin + share, n), begin)
    to = kept + (row * SPANS + span) * CAP
    # Each warp counts, then keeps what a stretch of its own has, and waits for none.
    stretch = (end - begin) // (ROWS * WARPS * 128) * (ROWS * 128)
    own_at = fours(ROWS, 1) + tl.arange(0, WARPS)[None, :, None, None] * stretch
    own_at = tl.multiple_of(begin + own_at, [1, 1, 1, 4]) + tl.arange(0, 4)
    counted = tl.zeros([WARPS, 32], tl.float32)
    for first in range(0, stretch, ROWS * 128):
        ones = tl.where(tl.load(source + first + own_at) >= t, 1.0, 0.0)
        counted += tl.sum(tl.sum(ones, axis=3), axis=0)
    counts_of = tl.sum(counted.to(tl.int32), axis=1)
    upto = tl.cumsum(counts_of, axis=0)
    place = (upto - counts_of)[None, :, None]
    num = tl.max(upto)
    for first in range(0, stretch, ROWS * 128):
        x = tl.load(source + first + own_at)
        a, b, c, d = quarters(x)
        before, more = places_of_warps(_reach(a, b, c, d, t))
        _keep(to, x, first + own_at, t, place + before, CAP)
        place += more
    begin += stretch * WARPS
    if begin < end:
        at = begin + fours(ROWS, WARPS)
        x = read(source, at, end)
        a, b, c, d = quarters(x)
        before, more = places(_reach(a, b, c, d, t))
        _keep(to, x, at + tl.arange(0, 4), t, num + before, CAP)
        num += more
    # Up to whole fours: nothing.
    behind = num + tl.arange(0, 4)
    nothing = _pair(tl.full([4], float("-inf"), tl.float32), behind)
    tl.store(to + behind, nothing, behind < tl.minimum((num + 3) // 4 * 4, CAP))
    tl.store(kept_counts + row * SPANS + span, num)
