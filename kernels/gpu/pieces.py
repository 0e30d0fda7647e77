"""Pieces of rows as programs hold them: read, and what is chosen of them stored densely and in
order.

A piece is lines of 128, of which a warp has some neighbours and each of its lanes four elements. So
only sums of whole warps pass through shared memory. Where it is read it is a tensor [N] of one
axis, which all versions of Triton lay out alike; line l of memory is at (l % ROWS, l // ROWS) of
[ROWS, WARPS, 128].
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.kth import before_warps


@triton.jit
def _line_at(i, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Where in memory the i-th line of a piece as it is read begins."""
    return (i % WARPS * ROWS + i // WARPS) * 128


@triton.jit
def elements(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Where in memory a piece's elements are, [ROWS * WARPS * 128]."""
    i = tl.arange(0, ROWS * WARPS * 128)
    at = _line_at(i // 128, ROWS, WARPS) + i % 128
    return tl.max_contiguous(tl.multiple_of(at, 128), 128)


@triton.jit
def fours(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Where its fours begin, [ROWS * WARPS * 32]."""
    i = tl.arange(0, ROWS * WARPS * 32)
    return _line_at(i // 32, ROWS, WARPS) + i % 32 * 4


@triton.jit
def read(source, at, n):
    """The elements `at` these places of a row of n, anything from n on. No load waits for what a
    mask says, so that all are under way at once. The last four may lie behind n in part, for rows
    begin at whole sectors of memory."""
    last = tl.maximum(n - 1, 0) // 4 * 4
    inside = tl.minimum(at // 4 * 4, last) + at % 4
    return tl.load(source + tl.max_contiguous(tl.multiple_of(inside, 4), 4))


@triton.jit
def quarters(x, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """The first, second, third and last of each four, [ROWS * WARPS * 32] each."""
    even, odd = tl.split(tl.reshape(x, [ROWS * WARPS * 32, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def places(shared, a, b, c, d, TIME: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """How many of those of a piece that are true lie before each of its fours, and how many there
    are. a to d: the quarters. TIME: 0 to 2, not the same for two in a row."""
    own = (a.to(tl.int32) + b.to(tl.int32)) + (c.to(tl.int32) + d.to(tl.int32))
    # Up to four lines are summed over a warp side by side, each in a byte.
    side: tl.constexpr = min(ROWS, 4)
    own = tl.reshape(own, [ROWS // side, side, WARPS, 32])
    shift = tl.arange(0, side)[None, :, None, None] * 8
    packed = tl.sum(own << shift, axis=1, keep_dims=True)
    lines = tl.sum(packed, axis=3, keep_dims=True)
    num = ((lines & 0xFF00FF) + ((lines >> 8) & 0xFF00FF)) * 0x10001 >> 16
    before = lines & ((1 << shift) - 1)
    before = ((before & 0xFF00FF) + ((before >> 8) & 0xFF00FF)) * 0x10001 >> 16
    before += tl.cumsum(num, axis=0) - num
    num = tl.reshape(tl.sum(num, axis=0), [1, WARPS, 1])
    before_warp, total = before_warps(shared, num, TIME)
    before += before_warp[None]
    lanes = (tl.cumsum(packed, axis=3) >> shift) & 0xFF
    return tl.reshape(before + (lanes - own), [ROWS * WARPS * 32]), total


@triton.jit
def store(to, a, b, c, d, i, j, m, n):
    """a to d where i to n are true, densely from `to` on, where the first goes. By quarters: stores
    of a whole piece, whose places are not known to be neighbours, would first be handed to other
    threads."""
    tl.store(to, a, mask=i)
    to += i.to(tl.int32)
    tl.store(to, b, mask=j)
    to += j.to(tl.int32)
    tl.store(to, c, mask=m)
    to += m.to(tl.int32)
    tl.store(to, d, mask=n)
