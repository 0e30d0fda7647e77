"""Exact top-k of each row by score descending, then position ascending. The specification is
kernels.topk.

A row is cut into groups that fit a program's registers; each gives its k best on, in ascending
position, until one group is left. The k-th best of a group is found by counting: floats as integers
of the same order, the next candidates by interpolating between the two last counts. Where rows are
many and long, a sieve goes first: a sample says which score the k best very probably exceed, and
where it was right, which is seen, a single group is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl

_SIEVED_ROWS: Final = 256  # fewer do not fill a device with a row a program
_ABSENT = tl.constexpr(-(2**31))  # below every score
_INTERPOLATIONS = tl.constexpr(20)  # then by halves, which end


@triton.jit
def _ordered(x):
    """float32 -> int32 of the same order; both zeros alike, -inf absent."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == float("-inf"), _ABSENT, key)


@triton.jit
def _number(key):
    """The float32 of an ordered key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _between(low, high, key):
    return tl.minimum(tl.maximum(key, low + 1), high - 1)


@triton.jit
def _kth(key, n, k):
    """The largest t such that at least k of the n keys are >= t; or a t with exactly k such."""
    low = tl.min(tl.where(key == _ABSENT, 2147483647, key))
    high = tl.max(key) + 1
    above_low = n  # how many are >= low
    above_high = n * 0
    step = n * 0
    while (high - low != 1) & (above_low != k):
        # Two guesses at once: as if numbers, and as if exponents, were spread evenly.
        share = (above_low - k).to(tl.float32) / (above_low - above_high).to(tl.float32)
        least, most = _number(low), _number(high)
        first = _between(low, high, _ordered(least + share * (most - least)))
        span = (high - low).to(tl.uint32, bitcast=True)  # as signed it may not fit
        part = (share * span.to(tl.float32)).to(tl.uint32)
        part = tl.where(step < _INTERPOLATIONS, part, span >> 1)
        part = tl.minimum(tl.maximum(part, 1), span - 1)
        second = low + part.to(tl.int32, bitcast=True)
        both = tl.sum((key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16))
        above_first, above_second = both & 0xFFFF, (both >> 16) & 0xFFFF
        if above_first >= k:
            low = first
            above_low = above_first
        else:
            high = first
            above_high = above_first
        if above_second >= k:
            if second > low:
                low = second
                above_low = above_second
        else:
            if second < high:
                high = second
                above_high = above_second
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
def _ranks(is_above, is_tied):
    """For each element of a piece [ROWS, COLUMNS], row after row, how many are above, and how many
    tied, up to it; and how many of each there are. Rows are counted each by its own warp, so that
    warps wait for each other only over the rows' sums."""
    packed = is_above.to(tl.int32) + (is_tied.to(tl.int32) << 16)
    within = tl.cumsum(packed, axis=1)
    sums = tl.sum(packed, axis=1)  # [ROWS]
    passed = within + (tl.cumsum(sums, axis=0) - sums)[:, None]
    total = tl.sum(sums)
    return passed & 0xFFFF, passed >> 16, total & 0xFFFF, total >> 16


@triton.jit
def _select(
    scores,  # [rows, score_stride]: float32 scores, or int32 keys from the level before
    positions,  # [rows, score_stride] int32 from the level before
    counts,  # [rows]: how many scores the rows had at first; below 0: the row is another's
    out_keys,  # [rows, out_stride] int32; written unless IS_LAST
    out_positions,  # [rows, out_stride] int32
    k,
    score_stride,
    out_stride,
    LEVEL: tl.constexpr,
    ARE_SCORES: tl.constexpr,  # not keys with positions
    IS_LAST: tl.constexpr,
    ALL_SCORED: tl.constexpr,  # rows with no more than k scores have them written, too
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # of a piece
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    count = tl.load(counts + row).to(tl.int32)
    if count < 0:
        return
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
        key = _keys(scores + source, tl.arange(0, GROUP), n, ARE_SCORES)
        present = tl.sum((key != _ABSENT).to(tl.int32))
        if present > k:
            threshold = _kth(key, present, k)
            room = k - tl.sum((key > threshold).to(tl.int32))
    # The keys are read again, from the cache, in pieces: fewer registers, so more programs at once.
    num_above = n * 0
    num_tied = n * 0
    to_keys = out_keys + row * out_stride + group * k
    to_positions = out_positions + row * out_stride + group * k
    for at in range(0, n, ROWS * COLUMNS):
        index = at + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        seen = tl.where(has_scores, n, 0)
        key = _keys(scores + source, index, seen, ARE_SCORES)
        is_above = (key > threshold) | (index >= seen) & (index < n)
        is_tied = (key == threshold) & (room > 0)
        above, tied, more_above, more_tied = _ranks(is_above, is_tied)
        above += num_above
        tied += num_tied
        is_kept = is_above | (is_tied & (tied <= room))
        place = above + tl.minimum(tied, room) - 1
        if ARE_SCORES:
            position = begin + index
        else:
            position = tl.load(positions + source + index, mask=is_kept, other=-1)
        tl.store(to_positions + place, position, mask=is_kept)
        if not IS_LAST:
            tl.store(to_keys + place, key, mask=is_kept)
        num_above += more_above
        num_tied += more_tied
    # Behind them: nothing.
    kept = num_above + tl.minimum(num_tied, room)
    slots = k if IS_LAST else tl.minimum(n, k)
    for at in range(kept, slots, 1024):
        slot = at + tl.arange(0, 1024)
        tl.store(to_positions + slot, -1, mask=slot < slots)
        if not IS_LAST:
            tl.store(to_keys + slot, _ABSENT, mask=slot < slots)


@triton.jit
def _sieve(
    scores,  # [rows, score_stride] float32
    counts,  # [rows]
    keys,  # [rows, cap] int32
    positions,  # [rows, cap] int32
    found,  # [rows] int32: how many passed; -1 where the row was left alone
    rest,  # [rows] int32: the count of a row that was left alone, else -1
    k,
    score_stride,
    cap,
    least,  # rows with no more scores are left alone
    SAMPLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(counts + row).to(tl.int32)
    num = n * 0 - 1
    if n > least:
        source = scores + row * score_stride
        # One of each n / SAMPLE neighbours, which one being hashed: scores have periods.
        i = tl.arange(0, SAMPLE)
        step = n // SAMPLE
        at = i * step + ((i.to(tl.uint32) * 2654435769) >> 8).to(tl.int32) % step
        sample = _keys(source, at, n, True)
        expected = k.to(tl.float32) * SAMPLE / n.to(tl.float32)  # of the k best in the sample
        rank = (expected + 4.0 * tl.sqrt(expected) + 3.0).to(tl.int32)
        present = tl.sum((sample != _ABSENT).to(tl.int32))
        if present >= rank:
            border = _kth(sample, present, rank)
            num = n * 0
            to_keys = keys + row * cap
            to_positions = positions + row * cap
            for first in range(0, n, ROWS * COLUMNS):
                inner = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
                key = _keys(source, first + inner, n, True)
                passes = key >= border
                place, _, more, _ = _ranks(passes, passes & (inner < 0))
                place += num - 1
                mask = passes & (place < cap)
                tl.store(to_keys + place, key, mask=mask)
                tl.store(to_positions + place, first + inner, mask=mask)
                num += more
            if (num < k) | (num > cap):
                num = n * 0 - 1
    tl.store(found + row, num)
    tl.store(rest + row, tl.where(num < 0, n, -1))


@dataclass(frozen=True, slots=True)
class Tile:
    """How rows are cut."""

    group: int = 8192  # elements a program keeps in registers
    piece: tuple[int, int] = (16, 128)  # elements whose ranks it finds at once
    warps: int = 4
    per_sampled: int = 32  # the sieve looks at one of so many first


def select(
    scores: torch.Tensor,  # [T, L] float32
    counts: torch.Tensor,  # [T] int32 or int64: row t has scores[t, : counts[t]]
    k: int,
    out: torch.Tensor,  # [T, k] int32
    *,
    all_scored: bool = False,
    tile: Tile = Tile(),
    sieves: bool | None = None,  # None: where it pays
) -> None:
    """out[t]: the columns of row t's k best, ascending, -1 behind them.

    A row with no more than k scores has all its columns chosen without its scores being read,
    unless `all_scored`: then a score of -inf is never chosen.
    """
    num_rows, width = scores.shape
    if num_rows == 0:
        return
    if 2 * k > tile.group:
        tile = replace(tile, group=triton.next_power_of_2(2 * k))
    if sieves is None:
        sieves = num_rows >= _SIEVED_ROWS and width > 1.5 * tile.group
    if sieves:
        counts = select_sieved(scores, counts, k, out, tile)
    keys, positions, level = scores, out, 0
    while True:
        groups = max(1, triton.cdiv(width, tile.group))
        is_last = groups == 1
        if is_last:
            next_keys = next_positions = out
        else:
            next_keys = scores.new_empty((num_rows, groups * k), dtype=torch.int32)
            next_positions = torch.empty_like(next_keys)
        # A short row needs no full group, where no level before counted in them.
        group = min(tile.group, triton.next_power_of_2(max(width, 16)))
        _launch(
            keys, positions, counts, next_keys, next_positions, k, tile,
            LEVEL=level, ARE_SCORES=level == 0, IS_LAST=is_last, ALL_SCORED=all_scored,
            GROUP=group if level == 0 else tile.group,
        )  # fmt: skip
        if is_last:
            return
        keys, positions, level, width = next_keys, next_positions, level + 1, groups * k


def select_sieved(
    scores: torch.Tensor, counts: torch.Tensor, k: int, out: torch.Tensor, tile: Tile
) -> torch.Tensor:
    """`select` for the rows that the sieve serves; counts for the others, -1 for those served."""
    num_rows, width = scores.shape
    cap = triton.next_power_of_2(2 * k)
    keys = scores.new_empty((num_rows, cap), dtype=torch.int32)
    positions = torch.empty_like(keys)
    found = scores.new_empty(num_rows, dtype=torch.int32)
    rest = torch.empty_like(found)
    rows, columns = tile.piece
    # Of the k best, a sample of this size has about the same number, however long the row.
    sample = max(16, min(4096, triton.next_power_of_2(width) // tile.per_sampled))
    _sieve[(num_rows,)](
        scores, counts, keys, positions, found, rest, k, scores.stride(0), cap,
        max(cap, sample), SAMPLE=sample, ROWS=rows, COLUMNS=columns, num_warps=tile.warps,
    )  # fmt: skip
    _launch(
        keys, positions, found, out, out, k, tile,
        LEVEL=0, ARE_SCORES=False, IS_LAST=True, ALL_SCORED=False, GROUP=cap,
    )  # fmt: skip
    return rest


def _launch(
    scores: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    out_keys: torch.Tensor,
    out_positions: torch.Tensor,
    k: int,
    tile: Tile,
    **form: int | bool,
) -> None:
    groups = triton.cdiv(scores.shape[1], form["GROUP"])
    rows, columns = tile.piece
    _select[(len(scores), max(1, groups))](
        scores, positions, counts, out_keys, out_positions, k,
        scores.stride(0), out_positions.stride(0),
        ROWS=rows, COLUMNS=columns, num_warps=tile.warps, **form,
    )  # fmt: skip


def exact_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores [T, L] float32, k <= L -> int64 [T, k]"""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    out = torch.empty((len(scores), k), dtype=torch.int32, device=scores.device)
    counts = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device)
    select(scores, counts, k, out, all_scored=True)
    return out.long()
