"""Pieces of rows of float32 scores as programs hold them: read, and what is chosen of them stored
densely and in order.

A piece is a tensor [ROWS, WARPS, 32, 4]: a thread holds four neighbours of each of ROWS lines of
128, which are neighbours, too. So it reads and counts without asking others, and only the sums of
whole warps pass through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fours(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Where in a piece its fours begin, [ROWS, WARPS, 32, 1]."""
    row = tl.arange(0, ROWS)[:, None, None, None]
    warp = tl.arange(0, WARPS)[None, :, None, None]
    lane = tl.arange(0, 32)[None, None, :, None]
    return (warp * (ROWS * 128) + lane * 4) + row * 128


@triton.jit
def read(source, at, n):
    """Four neighbours from each element `at` on of a row of n; -inf from n on. No load waits for
    what a mask says, so that all are under way at once. The last four may lie behind n in part, for
    rows begin at whole sectors of memory."""
    last = tl.maximum(n - 1, 0) // 4 * 4
    begin = tl.multiple_of(tl.minimum(at, last), [1, 1, 1, 4])
    x = tl.load(source + begin + tl.arange(0, 4))
    return tl.where(at + tl.arange(0, 4) < n, x, float("-inf"))


@triton.jit
def spread(i, n, NUM: tl.constexpr):
    """The i-th of NUM places in a row of n: one in each share, which one being hashed, for scores
    have periods."""
    share = tl.maximum(n // NUM, 1).to(tl.uint32)
    aside = tl.umulhi(i.to(tl.uint32) * 2654435769, share)
    return tl.minimum(i.to(tl.uint32) * share + aside, (n - 1).to(tl.uint32)).to(tl.int32)


@triton.jit
def places_of_warps(own):
    """own: how many of each four of a piece are chosen, [ROWS, WARPS, 32]. How many of the same
    warp's are before each four, and how many a warp has, [1, WARPS, 1]."""
    # Lines are summed over a warp side by side, each in a byte.
    shift = tl.arange(0, own.shape[0])[:, None, None] * 8
    if own.shape[0] <= 4:
        packed = tl.sum(own << shift, axis=0, keep_dims=True)
        lines = tl.sum(packed, axis=2, keep_dims=True)
        before = lines & ((1 << shift) - 1)
        before = ((before & 0xFF00FF) + ((before >> 8) & 0xFF00FF)) * 0x10001 >> 16
        warps = ((lines & 0xFF00FF) + ((lines >> 8) & 0xFF00FF)) * 0x10001 >> 16
    else:
        packed = tl.sum(own.to(tl.int64) << shift, axis=0, keep_dims=True)
        lines = tl.sum(packed, axis=2, keep_dims=True)
        before = lines & ((tl.full(shift.shape, 1, tl.int64) << shift) - 1)
        before = (before & 0xFF00FF00FF00FF) + ((before >> 8) & 0xFF00FF00FF00FF)
        before = (before * 0x1000100010001 >> 48).to(tl.int32)
        warps = (lines & 0xFF00FF00FF00FF) + ((lines >> 8) & 0xFF00FF00FF00FF)
        warps = (warps * 0x1000100010001 >> 48).to(tl.int32)
    lanes = ((tl.cumsum(packed, axis=2) >> shift) & 0xFF).to(tl.int32)
    return before + (lanes - own), warps


@triton.jit
def places(own):
    """How many are before each four of a piece, and how many in all."""
    place, warps = places_of_warps(own)
    upto = tl.cumsum(warps, axis=1)
    return (upto - warps) + place, tl.max(upto)


@triton.jit
def quarters(x):
    """[..., 4] -> four tensors [...]"""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 32, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def store(to, a, b, c, d, i, j, m, n, place):
    """a to d where i to n are true, densely from `place` on. By quarters: stores of a whole piece,
    whose places are not known to be neighbours, would first be handed to other threads."""
    tl.store(to + place, a, mask=i)
    place = tl.where(i, place + 1, place)
    tl.store(to + place, b, mask=j)
    place = tl.where(j, place + 1, place)
    tl.store(to + place, c, mask=m)
    place = tl.where(m, place + 1, place)
    tl.store(to + place, d, mask=n)
