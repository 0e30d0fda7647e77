"""Exact top-k of each row by score descending, then position ascending. The specification is
kernels.topk.

A row is cut into groups that fit a program's registers; each gives its k best on, in ascending
position, until one group is left. The k-th best of a group is found by counting: floats as integers
of the same order, the next candidate by interpolating between the two last counts.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_GROUP: Final = 8192  # elements a program keeps in registers
_ABSENT = tl.constexpr(-(2**31))  # below every score
_INTERPOLATIONS = tl.constexpr(20)  # then by halves, which end


@triton.jit
def _ordered(x):
    """float32 -> int32 of the same order; both zeros alike, -inf absent."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == float("-inf"), _ABSENT, key)


@triton.jit
def _kth(key, n, k):
    """The largest t such that at least k of the n keys are >= t; or a t with exactly k such."""
    low = tl.min(tl.where(key == _ABSENT, 2147483647, key))
    high = tl.max(key) + 1  # no NaN among the scores, so this is no overflow
    above_low = n  # how many are >= low
    above_high = n * 0
    step = n * 0
    while (high - low != 1) & (above_low != k):
        span = (high - low).to(tl.uint32, bitcast=True)  # as signed it may not fit
        if step < _INTERPOLATIONS:
            share = (above_low - k).to(tl.float32) / (above_low - above_high).to(tl.float32)
            part = (share * span.to(tl.float32)).to(tl.uint32)
        else:
            part = span >> 1
        part = tl.minimum(tl.maximum(part, 1), span - 1)
        middle = low + part.to(tl.int32, bitcast=True)
        above = tl.sum((key >= middle).to(tl.int32))
        if above >= k:
            low = middle
            above_low = above
        else:
            high = middle
            above_high = above
        step += 1
    return low


@triton.jit
def _keys(scores, index, n, IS_FLOAT: tl.constexpr):
    """The ordered keys at `index`, absent from n on."""
    if IS_FLOAT:
        return _ordered(tl.load(scores + index, mask=index < n, other=float("-inf")))
    else:
        return tl.load(scores + index, mask=index < n, other=_ABSENT)


@triton.jit
def _select(
    scores,  # [rows, score_stride]: float32 scores, or int32 keys from the level before
    positions,  # [rows, score_stride] int32 from the level before
    counts,  # [rows]: how many scores the rows had at first
    out_keys,  # [rows, out_stride] int32; written unless IS_LAST
    out_positions,  # [rows, out_stride] int32
    k,
    score_stride,
    out_stride,
    LEVEL: tl.constexpr,
    IS_LAST: tl.constexpr,
    ALL_SCORED: tl.constexpr,  # rows with no more than k scores have them written, too
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    count = tl.load(counts + row).to(tl.int32)
    has_scores = (count > k) | ALL_SCORED
    for _ in tl.static_range(LEVEL):
        count = count // GROUP * k + tl.minimum(count % GROUP, k)
    begin = group * GROUP
    n = tl.minimum(count - begin, GROUP)  # of this group; below 1: none
    if (n <= 0) & ((not IS_LAST) | (group > 0)):
        return
    n = tl.maximum(n, 0)
    source = row * score_stride + begin
    # Chosen are the keys above the threshold, and the first `room` that equal it.
    threshold = n * 0 + _ABSENT
    room = n * 0
    if has_scores & (n > k):
        key = _keys(scores + source, tl.arange(0, GROUP), n, LEVEL == 0)
        present = tl.sum((key != _ABSENT).to(tl.int32))
        if present > k:
            threshold = _kth(key, present, k)
            room = k - tl.sum((key > threshold).to(tl.int32))
    # The keys are read again, from the cache, in pieces: fewer registers, so more programs at once.
    num_above = n * 0
    num_tied = n * 0
    target = row * out_stride + group * k
    for at in range(0, n, CHUNK):
        index = at + tl.arange(0, CHUNK)
        if has_scores:
            key = _keys(scores + source, index, n, LEVEL == 0)
            is_above = key > threshold
            is_tied = (key == threshold) & (room > 0)
        else:
            key = tl.full([CHUNK], _ABSENT, tl.int32)
            is_above = index < n
            is_tied = index < 0
        # One scan for both: how many above, and how many tied, up to here.
        passed = tl.cumsum(is_above.to(tl.int32) + (is_tied.to(tl.int32) << 16), axis=0)
        above = num_above + (passed & 0xFFFF)
        tied = num_tied + (passed >> 16)
        is_kept = is_above | (is_tied & (tied <= room))
        place = target + above + tl.minimum(tied, room) - 1
        if LEVEL == 0:
            position = begin + index
        else:
            position = tl.load(positions + source + index, mask=is_kept, other=-1)
        tl.store(out_positions + place, position, mask=is_kept)
        if not IS_LAST:
            tl.store(out_keys + place, key, mask=is_kept)
        num_above += tl.sum(is_above.to(tl.int32))
        num_tied += tl.sum(is_tied.to(tl.int32))
    # Behind them: nothing.
    kept = num_above + tl.minimum(num_tied, room)
    slots = k if IS_LAST else tl.minimum(n, k)
    for at in range(kept, slots, CHUNK):
        slot = at + tl.arange(0, CHUNK)
        tl.store(out_positions + target + slot, -1, mask=slot < slots)
        if not IS_LAST:
            tl.store(out_keys + target + slot, _ABSENT, mask=slot < slots)


def select(
    scores: torch.Tensor,  # [T, L] float32
    counts: torch.Tensor,  # [T] int32 or int64: row t has scores[t, : counts[t]]
    k: int,
    out: torch.Tensor,  # [T, k] int32
    *,
    all_scored: bool = False,
    group: int = _GROUP,
    warps: int = 0,
    chunk: int = 0,
) -> None:
    """out[t]: the columns of row t's k best, ascending, -1 behind them.

    A row with no more than k scores has all its columns chosen without its scores being read,
    unless `all_scored`: then a score of -inf is never chosen.
    """
    num_rows, width = scores.shape
    if num_rows == 0:
        return
    if 2 * k > group:
        group = triton.next_power_of_2(2 * k)
    keys, positions, level = scores, out, 0
    while True:
        fits = triton.next_power_of_2(width)
        groups = max(1, triton.cdiv(width, group))
        is_last = groups == 1
        shape = (num_rows, groups * k)
        next_keys, next_positions = (
            (out, out)
            if is_last
            else (
                torch.empty(shape, dtype=torch.int32, device=scores.device),
                torch.empty(shape, dtype=torch.int32, device=scores.device),
            )
        )
        # At the first level a short row needs no full group; later ones count in groups.
        size = min(group, max(fits, 16)) if level == 0 and is_last else group
        _select[(num_rows, groups)](
            keys, positions, counts, next_keys, next_positions, k,
            keys.stride(0), next_positions.stride(0),
            LEVEL=level, IS_LAST=is_last, ALL_SCORED=all_scored, GROUP=size,
            CHUNK=min(size, chunk or 2048), num_warps=warps or max(1, min(16, size // 512)),
        )  # fmt: skip
        if is_last:
            return
        keys, positions, level, width = next_keys, next_positions, level + 1, shape[1]


def exact_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores [T, L] float32, k <= L -> int64 [T, k]"""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    out = torch.empty((len(scores), k), dtype=torch.int32, device=scores.device)
    counts = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device)
    select(scores, counts, k, out, all_scored=True)
    return out.long()
