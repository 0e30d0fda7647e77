"""The k-th best of a row of float32 scores, by its digits: how many elements have each value of the
highest eight bits, then, of those that share the k-th's, of the next eight, and so on.

Triton's language has no memory that a program's threads share. So the counts are in an array of
their own, which a few lines of PTX declare, add to and search; Triton's interpreter, which runs
none, counts with numpy.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

NOTHING = tl.constexpr(0x007FFFFF)  # the key of -inf, which is never chosen
_NUM_BINS: Final = 256  # a digit has eight bits
_BINS = tl.constexpr(_NUM_BINS)
_ON_CARD = tl.constexpr(not triton.knobs.runtime.interpret)
_DIGIT_BYTES = tl.constexpr(4 * _NUM_BINS + 16)  # a digit's counts, and one of those with none
_ZEROED: Final = 512  # fours of numbers: all of them, up to a power of two
_FOURS_ZEROED = tl.constexpr(_ZEROED)
# Behind what is zeroed, for warps that are late still read it then: a number of each, three times.
_WARPS_AT = tl.constexpr(16 * _ZEROED)
_SHARE = tl.constexpr(
    f"{{ .shared .align 16 .b32 shared[{4 * _ZEROED + 3 * 32}];"
    " mov.u32 $0, shared; add.u32 $0, $0, $1; }"
)
_STORE = tl.constexpr("{ st.shared.u32 [$1], $2; mov.u32 $0, 0; }")
_NONE = tl.constexpr("{ st.shared.v4.u32 [$1], {$2, $2, $2, $2}; mov.u32 $0, 0; }")


def _add_ones(shift: int) -> str:
    """For the digits at `shift` of four keys, $4 to $7, of which those that are counted share with
    $8 what is above. Together, for keys fill the registers. Where few are counted, most fours are
    passed over."""
    keys = [f"t{i}" for i in range(4)]
    text = f"{{ .reg .pred p; .reg .b32 {', '.join(keys)}; "
    for i, t in enumerate(keys):
        text += f"sub.u32 {t}, ${4 + i}, $8; " if shift < 24 else f"mov.u32 {t}, ${4 + i}; "
    if shift < 16:
        text += f"setp.lt.u32 p, t0, {_NUM_BINS << shift}; "
        text += "".join(f"setp.lt.or.u32 p, {t}, {_NUM_BINS << shift}, p; " for t in keys[1:])
        text += "@!p bra none; "
    for t in keys:
        text += f"shr.u32 {t}, {t}, {shift}; "
        text += f"min.u32 {t}, {t}, {_NUM_BINS}; " if shift < 24 else ""
        text += f"mad.lo.u32 {t}, {t}, 4, $12; red.shared.add.u32 [{t}], 1; "
    return text + "none: " + "".join(f"mov.u32 ${i}, 0; " for i in range(4)) + "}"


_FIRST, _SECOND, _THIRD, _LAST = (tl.constexpr(_add_ones(shift)) for shift in (24, 16, 8, 0))
_FOURS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 12))
_UPTO = "".join(  # the sum of `upto` of this lane and of those before it
    f"shfl.sync.up.b32 t|p, upto, {lanes}, 0, -1; @p add.u32 upto, upto, t; "
    for lanes in (1, 2, 4, 8, 16)
)
_BEFORE = tl.constexpr(
    "{ .reg .pred p; .reg .b32 t, own, upto; mov.u32 t, %laneid; mad.lo.u32 t, t, 4, $1;"
    f" ld.shared.u32 own, [t]; mov.u32 upto, own; {_UPTO}"
    " sub.u32 upto, upto, own; shfl.sync.idx.b32 $0, upto, $2, 31, -1; }"
)
_TOTAL = tl.constexpr(
    "{ .reg .pred p; .reg .b32 t, own; mov.u32 own, 0; mov.u32 t, %laneid; setp.lt.u32 p, t, $2;"
    " mad.lo.u32 t, t, 4, $1; @p ld.shared.u32 own, [t]; redux.sync.add.s32 $0, own, -1; }"
)


def _search() -> str:
    """In every warp alike: each lane has eight bins, the first lane the highest. One lane's reach
    the k-th; it walks through its own, and tells the others."""
    bins = [f"c{i}" for i in range(8)]
    walk = "".join(
        f"setp.lt.u32 p, reach, $4; @p mov.u32 over, reach; @p add.u32 reach, reach, {c};"
        " @p sub.u32 digit, digit, 1; "
        for c in bins[6::-1]
    )
    found = zip(("$0", "$1", "$2"), ("digit", "reach", "over"), strict=True)
    return (
        "{ .reg .pred p, q;"
        f" .reg .b32 lane, at, t, sum, upto, over, reach, digit, {', '.join(bins)};"
        " mov.u32 lane, %laneid; xor.b32 lane, lane, 31; mad.lo.u32 at, lane, 32, $3;"
        " ld.shared.v4.u32 {c0, c1, c2, c3}, [at]; ld.shared.v4.u32 {c4, c5, c6, c7}, [at + 16];"
        " add.u32 sum, c0, c1; add.u32 t, c2, c3; add.u32 sum, sum, t; add.u32 t, c4, c5;"
        " add.u32 sum, sum, t; add.u32 t, c6, c7; add.u32 sum, sum, t; mov.u32 upto, sum;"
        f" {_UPTO} add.u32 upto, upto, $5; sub.u32 over, upto, sum;"
        " setp.lt.u32 p, over, $4; setp.ge.and.u32 q, upto, $4, p; add.u32 reach, over, c7;"
        f" mad.lo.u32 digit, lane, 8, 7; {walk}"
        "vote.sync.ballot.b32 t, q, -1; bfind.u32 t, t; "
        + "".join(f"shfl.sync.idx.b32 {to}, {of}, t, 31, -1; " for to, of in found)
        + "}"
    )


_SEARCH = tl.constexpr(_search())


@triton.jit
def key_of(x):
    """float32 -> uint32 of the same order; both zeros alike."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return (bits ^ ((bits >> 31) | -(2**31))).to(tl.uint32, bitcast=True)


@triton.jit
def shared_memory(zero):
    """Where a program's shared memory is, once in a kernel. `zero` is a scalar."""
    if _ON_CARD:
        return tl.inline_asm_elementwise(_SHARE, "=r,r", [zero], tl.int32, is_pure=False, pack=1)
    else:
        return zero


@triton.jit
def no_counts(shared):
    """Begin to count."""
    if _ON_CARD:
        four = shared + tl.arange(0, _FOURS_ZEROED) * 16
        args = [four, four * 0]
        tl.inline_asm_elementwise(_NONE, "=r,r,r", args, tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


@triton.jit
def before_warps(shared, num, TIME: tl.constexpr):
    """The sum of the numbers [1, WARPS, 1] of the warps before each, and of all. TIME: 0 to 2, not
    the same for two in a row."""
    if _ON_CARD:
        warps = tl.arange(0, num.numel)[None, :, None]
        numbers = shared + (_WARPS_AT + TIME * 128)
        args = [numbers + warps * 4, num]
        tl.inline_asm_elementwise(_STORE, "=r,r,r", args, tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        before = tl.inline_asm_elementwise(
            _BEFORE, "=r,r,r", [numbers, warps], tl.int32, is_pure=False, pack=1
        )
        total = tl.inline_asm_elementwise(
            _TOTAL, "=r,r,r", [numbers, num.numel], tl.int32, is_pure=False, pack=1
        )
        return before, total
    else:
        return tl.cumsum(num, axis=1) - num, tl.sum(num)


@triton.jit
def _narrow(shared, key, k, low, above, ADD_ONES: tl.constexpr, SHIFT: tl.constexpr):
    """`low` with the k-th's digit at SHIFT, how many reach that, and how many exceed it there."""
    if _ON_CARD:
        counts = shared + SHIFT // 8 * _DIGIT_BYTES
        args = [key, low, counts]
        tl.inline_asm_elementwise(ADD_ONES, _FOURS, args, tl.int32, is_pure=False, pack=4)
        tl.debug_barrier()
        types: tl.constexpr = (tl.int32, tl.int32, tl.int32)
        digit, reach, above = tl.inline_asm_elementwise(
            _SEARCH, "=r,=r,=r,r,r,r", [counts, k, above], types, is_pure=False, pack=1
        )
    else:
        digit = (key - low) >> SHIFT  # of those that share what is above it; others' are no digits
        counts = tl.histogram(tl.minimum(digit, _BINS).to(tl.int32), 2 * _BINS)
        counts, _ = tl.split(tl.trans(tl.reshape(counts, [2, _BINS])))
        reaches = above + tl.cumsum(counts, axis=0, reverse=True)
        is_it = (reaches >= k) & (reaches - counts < k)
        digit = tl.sum(tl.where(is_it, tl.arange(0, _BINS), 0))
        reach = tl.sum(tl.where(is_it, reaches, 0))
        above = tl.sum(tl.where(is_it, reaches - counts, 0))
    return low + (digit.to(tl.uint32) << SHIFT), reach, above


@triton.jit
def kth(shared, key, k):
    """The largest key that k of these reach; how many do, and how many exceed it or, if it is k
    that reach it, a number fewer than k. key: 1-D, more than k elements."""
    low, reach, above = (k * 0).to(tl.uint32), k * 0, k * 0
    low, reach, above = _narrow(shared, key, k, low, above, _FIRST, 24)
    if reach > k:
        low, reach, above = _narrow(shared, key, k, low, above, _SECOND, 16)
    if reach > k:
        low, reach, above = _narrow(shared, key, k, low, above, _THIRD, 8)
    if reach > k:
        low, reach, above = _narrow(shared, key, k, low, above, _LAST, 0)
    return low, reach, above
