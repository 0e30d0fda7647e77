"""What a row's k best very probably reach, and all of the row that reaches it, with its positions.
How many of the best are in a sample says it; how many are kept shows where the sample was wrong."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.kth import NOTHING, key_of, kth, number, shared_counts
from kernels.gpu.pieces import fours, places, quarters, read, spread, store


@triton.jit
def _pair(x, position):
    """float32 and int32 as one int64"""
    return x.to(tl.int32, bitcast=True).to(tl.int64) << 32 | position.to(tl.int64)


@triton.jit
def parts(pair):
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), pair.to(tl.int32)


@triton.jit
def _keep(to, x, position, least, num, CAP: tl.constexpr):
    """Add the pairs of those of a piece that reach `least` to the `num` before them. Where there
    are too many, the last four are taken by all."""
    a, b, c, d = quarters(x)
    i, j, m, p = a >= least, b >= least, c >= least, d >= least
    own = tl.where(i, 1.0, 0.0) + tl.where(j, 1.0, 0.0)
    own += tl.where(m, 1.0, 0.0) + tl.where(p, 1.0, 0.0)
    place, more = places(own.to(tl.int32))
    a, b, c, d = quarters(_pair(x, position))
    store(to, a, b, c, d, i, j, m, p, tl.minimum(place + num, CAP - 4))
    return num + more


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
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    n = tl.load(counts + row).to(tl.int32)
    if n <= CAP:
        return
    source = scores + row * score_stride
    sample: tl.constexpr = SAMPLE_ROWS * WARPS * 128
    at = spread(fours(SAMPLE_ROWS, WARPS) + tl.arange(0, 4), n, sample)
    x = tl.load(source + at)
    # The k best, and as many as there is room for, have this many in the sample, give or take the
    # root. Halfway between the roots, a miss of either is as unlikely.
    expected = k.to(tl.float32) * sample / n.to(tl.float32)
    most = CAP * sample / n.to(tl.float32)
    root = (tl.sqrt(expected) + tl.sqrt(most)) * 0.5
    rank = tl.minimum(root * root, expected + 5.0 * tl.sqrt(expected) + 5.0).to(tl.int32)
    least = (n * 0).to(tl.uint32)
    if rank < sample:
        shared = shared_counts(n * 0)
        size = rank * 0 + sample
        least, _, _ = kth(shared, key_of(x), source, at, size, rank, rank // 16, IS_LONG=False)
    t = number(tl.maximum(least, NOTHING + 1))
    to = kept + (row * SPANS + span) * CAP
    piece: tl.constexpr = ROWS * WARPS * 128
    share = tl.cdiv(tl.cdiv(n, SPANS), piece) * piece
    begin = span * share
    end = tl.maximum(tl.minimum(begin + share, n), begin)
    whole = begin + (end - begin) // piece * piece
    num = n * 0
    at = fours(ROWS, WARPS) + tl.arange(0, 4)
    for first in tl.range(begin, whole, piece, num_stages=STAGES):
        num = _keep(to, tl.load(source + first + at), first + at, t, num, CAP)
    if whole < end:
        num = _keep(to, read(source, whole + fours(ROWS, WARPS), end), whole + at, t, num, CAP)
    # Up to whole fours: nothing.
    behind = num + tl.arange(0, 4)
    nothing = _pair(tl.full([4], float("-inf"), tl.float32), behind)
    tl.store(to + behind, nothing, behind < tl.minimum((num + 3) // 4 * 4, CAP))
    tl.store(kept_counts + row * SPANS + span, num)
