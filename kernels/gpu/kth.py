"""The k-th best of a row of float32 scores, by its digits: how many elements have each value of the
highest ten bits, then, of those that share the k-th's, of the next eleven, and of the last.

Triton's language has no memory that a program's threads share. So the counts are in an array of
their own, which a few lines of PTX declare, add to and read; Triton's interpreter, which runs none,
counts with numpy.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kernels.gpu.pieces import read

NOTHING = tl.constexpr(0x007FFFFF)  # the key of -inf, which is never chosen
_NUM_BINS: Final = 2048  # a digit has eleven bits
_BINS = tl.constexpr(_NUM_BINS)
_ON_CARD = tl.constexpr(not triton.knobs.runtime.interpret)
_FOUND = tl.constexpr(4 * _NUM_BINS + 16)  # where, behind the counts, what was found is
_SHARE = tl.constexpr(
    f"{{ .shared .align 16 .b32 counts[{_NUM_BINS + 8}]; mov.u32 $0, counts; add.u32 $0, $0, $1; }}"
)
_ADD_ONE = tl.constexpr("red.shared.add.u32 [$1], 1; mov.u32 $0, 0;")
_STORE = tl.constexpr("{ st.shared.v4.u32 [$1], {$2, $2, $2, $2}; mov.u32 $0, 0; }")
_STORE_IF = tl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $5, 0; @p st.shared.v4.u32 [$1], {$2, $3, $4, $4};"
    " mov.u32 $0, 0; }"
)
_LOAD = tl.constexpr("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];")


@triton.jit
def key_of(x):
    """float32 -> uint32 of the same order; both zeros alike."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return (bits ^ ((bits >> 31) | -(2**31))).to(tl.uint32, bitcast=True)


@triton.jit
def number(key):
    """The float32 of a key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def shared_counts(zero):
    """Where a program's counts are, once in a kernel; `zero` is a scalar 0."""
    if _ON_CARD:
        return tl.inline_asm_elementwise(_SHARE, "=r,r", [zero], tl.int32, is_pure=False, pack=1)
    else:
        return zero


@triton.jit
def _no_counts(shared):
    if _ON_CARD:
        four = shared + tl.arange(0, _BINS // 4) * 16
        tl.inline_asm_elementwise(
            _STORE, "=r,r,r", [four, four * 0], tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        return shared
    else:
        return tl.zeros([2 * _BINS], tl.int32)


@triton.jit
def _count(counts, key, low, SHIFT: tl.constexpr):
    """Count the digits at SHIFT of those that share what is above it with `low`. The others' are
    too large: they are counted behind the last."""
    digit = tl.minimum((key - low) >> SHIFT, _BINS).to(tl.int32)
    if _ON_CARD:
        tl.inline_asm_elementwise(
            _ADD_ONE, "=r,r", [counts + digit * 4], tl.int32, is_pure=False, pack=1
        )
        return counts
    else:
        return counts + tl.histogram(tl.ravel(digit), 2 * _BINS)


@triton.jit
def _counted(counts):
    """How many there are of each digit, four digits side by side: four tensors."""
    if _ON_CARD:
        tl.debug_barrier()
        four = counts + tl.arange(0, _BINS // 4) * 16
        types: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        return tl.inline_asm_elementwise(
            _LOAD, "=r,=r,=r,=r,r", [four], types, is_pure=False, pack=1
        )
    else:
        own, _ = tl.split(tl.trans(tl.reshape(counts, [2, _BINS])))
        even, odd = tl.split(tl.reshape(own, [_BINS // 4, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return a, b, c, d


@triton.jit
def _only(shared, a, b, c, is_it):
    """The elements of three tensors where the one `is_it` is."""
    if _ON_CARD:
        found = shared + _FOUND
        args = [found + a * 0, a, b, c, is_it.to(tl.int32)]
        tl.inline_asm_elementwise(_STORE_IF, "=r,r,r,r,r,r", args, tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        types: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        x, y, z, _ = tl.inline_asm_elementwise(
            _LOAD, "=r,=r,=r,=r,r", [found], types, is_pure=False, pack=1
        )
        return x, y, z
    else:
        x, y, z = tl.where(is_it, a, 0), tl.where(is_it, b, 0), tl.where(is_it, c, 0)
        return tl.sum(x), tl.sum(y), tl.sum(z)


@triton.jit
def _narrow(
    shared, key, source, at, n, k, low, above, IS_LONG: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """`low` with the k-th's digit at SHIFT, how many reach that, and how many exceed it there."""
    counts = _no_counts(shared)
    if IS_LONG:
        for first in range(0, n, key.numel):
            counts = _count(counts, key_of(read(source, first + at, n)), low, SHIFT)
    else:
        counts = _count(counts, key, low, SHIFT)
    a, b, c, d = _counted(counts)
    num = (a + b) + (c + d)
    reach_a = above + tl.cumsum(num, axis=0, reverse=True)
    over = reach_a - num
    reach_d = over + d
    reach_c = reach_d + c
    reach_b = reach_c + b
    is_b, is_c, is_d = reach_b >= k, reach_c >= k, reach_d >= k
    digit = tl.arange(0, num.numel) * 4 + is_b.to(tl.int32) + is_c.to(tl.int32) + is_d.to(tl.int32)
    reach = tl.where(is_d, reach_d, tl.where(is_c, reach_c, tl.where(is_b, reach_b, reach_a)))
    beyond = tl.where(is_d, over, tl.where(is_c, reach_d, tl.where(is_b, reach_c, reach_b)))
    digit, reach, beyond = _only(shared, digit, reach, beyond, (reach_a >= k) & (over < k))
    return low + (digit.to(tl.uint32) << SHIFT), reach, beyond


@triton.jit
def kth(shared, key, source, at, n, k, slack, IS_LONG: tl.constexpr):
    """A key, how many of the n > k elements reach it, and a number fewer than k of them that reach
    larger ones. It is the largest that k reach, or one that k to k + slack do. The elements have
    these keys, or, if IS_LONG, are to be read a piece at a time. What is no element is -inf."""
    low, above = (n * 0).to(tl.uint32), n * 0
    low, reach, above = _narrow(shared, key, source, at, n, k, low, above, IS_LONG, 22)
    if reach > k + slack:
        low, reach, above = _narrow(shared, key, source, at, n, k, low, above, IS_LONG, 11)
    if reach > k + slack:
        low, reach, above = _narrow(shared, key, source, at, n, k, low, above, IS_LONG, 0)
    return low, reach, above
