"""Exact top-k of each row by score descending, then position ascending. The specification is
kernels.topk.

A row that fits a program's registers is held there, and its k-th best found by counting. Of a
longer row a sieve first keeps what, a sample says, the k best very probably reach. Where the sample
was wrong, which the count of what was kept shows, the row is read for every count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels.gpu.kth import NOTHING, fours, key_of, kth, number, read, shared_counts, spread


@triton.jit
def _places_of_warps(own):
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
def _places(own):
    """How many are before each four of a piece, and how many in all."""
    place, warps = _places_of_warps(own)
    upto = tl.cumsum(warps, axis=1)
    return (upto - warps) + place, tl.max(upto)


@triton.jit
def _quarters(x):
    """[..., 4] -> four tensors [...]"""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 32, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _store(to, a, b, c, d, i, j, m, n, place):
    """a to d where i to n are true, densely from `place` on. By quarters: stores of a whole piece,
    whose places are not known to be neighbours, would first be handed to other threads."""
    tl.store(to + place, a, mask=i)
    place = tl.where(i, place + 1, place)
    tl.store(to + place, b, mask=j)
    place = tl.where(j, place + 1, place)
    tl.store(to + place, c, mask=m)
    place = tl.where(m, place + 1, place)
    tl.store(to + place, d, mask=n)


@triton.jit
def _first(ones, limit):
    """The first `limit` of the ones; how many there are in all."""
    place, num = _places(tl.sum(ones, axis=3))
    place = place[:, :, :, None] + tl.cumsum(ones, axis=3) - ones
    return tl.where(place < limit, ones, 0), num


@triton.jit
def _pair(x, position):
    """float32 and int32 as one int64"""
    return x.to(tl.int32, bitcast=True).to(tl.int64) << 32 | position.to(tl.int64)


@triton.jit
def _parts(pair):
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
    a, b, c, d = _quarters(x)
    i, j, m, p = a >= least, b >= least, c >= least, d >= least
    a, b, c, d = _quarters(_pair(x, position))
    _store(to, a, b, c, d, i, j, m, p, tl.minimum(place, CAP - 4))


@triton.jit
def _kept_at(at, counts, CAP: tl.constexpr, SPANS: tl.constexpr):
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


@triton.jit
def _choose_from(shared, key, position, source, at, n, k, to, IS_LONG: tl.constexpr):
    """Write the positions of the k best of n elements: of these keys and positions, or, if IS_LONG,
    of those to be read, which are in order. Returns how many there were."""
    low, reach, above = (n * 0).to(tl.uint32), n, n
    if n > k:
        low, reach, above = kth(shared, key, source, at, n, k, 0, IS_LONG)
    least = tl.maximum(low, NOTHING + 1)
    has_ties = (reach > k) & (low == least)
    room = k - above  # for those that equal it
    num_kept = n * 0
    for first in range(0, n, key.numel):
        if IS_LONG:
            key = key_of(read(source, first + at, n))
            position = first + at + tl.arange(0, 4)
        ones = (key >= least).to(tl.int32)
        if has_ties:
            tied, num_tied = _first((key == least).to(tl.int32), room)
            ones = (key > least).to(tl.int32) + tied
            room -= num_tied
        place, num = _places(tl.sum(ones, axis=3))
        a, b, c, d = _quarters(position)
        i, j, m, p = _quarters(ones)
        _store(to, a, b, c, d, i == 1, j == 1, m == 1, p == 1, num_kept + place)
        num_kept += num
    return num_kept


@triton.jit(do_not_specialize=["k"])
def _choose(
    scores,  # [rows, score_stride] float32
    counts,  # [rows]: how many scores each row has
    kept,  # [rows, SPANS, size of a piece] int64: pairs that the sieve kept of longer rows
    kept_counts,  # [rows, SPANS]
    out,  # [rows, out_stride] int32
    k,
    score_stride,
    out_stride,
    ALL_SCORED: tl.constexpr,  # rows with no more than k scores have them read, too
    SPANS: tl.constexpr,  # of the sieve; 0: no row has more than a piece
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(counts + row).to(tl.int32)
    to = out + row * out_stride
    if (n <= k) & (not ALL_SCORED):
        for first in range(0, k, 1024):
            slot = first + tl.arange(0, 1024)
            tl.store(to + slot, tl.where(slot < n, slot, -1), mask=slot < k)
        return
    source = scores + row * score_stride
    shared = shared_counts(n * 0)
    at = fours(ROWS, WARPS)
    if SPANS == 0:
        key = key_of(read(source, at, n))
        num = _choose_from(shared, key, at + tl.arange(0, 4), source, at, n, k, to, False)
    else:
        size: tl.constexpr = ROWS * WARPS * 128
        # Any row has memory for a piece, and so has what is kept of it.
        own, own_counts = kept + row * (SPANS * size), kept_counts + row * SPANS
        num_real, num_held = n, n
        position = at + tl.arange(0, 4)
        x = tl.load(source + position)
        if n > size:
            where, num_real, num_held = _kept_at(at, own_counts, size, SPANS)
            x, position = _parts(tl.load(own + where + tl.arange(0, 4)))
        key = key_of(tl.where(at + tl.arange(0, 4) < num_held, x, float("-inf")))
        if (n > size) & ((num_real < k) | (num_held > size - 4)):
            num = _choose_from(shared, key, position, source, at, n, k, to, True)
        else:
            num = _choose_from(shared, key, position, source, at, num_held, k, to, False)
    for first in range(num, k, 1024):
        slot = first + tl.arange(0, 1024)
        tl.store(to + slot, -1, mask=slot < k)


@triton.jit(do_not_specialize=["k"])
def _sieve(
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
        a, b, c, d = _quarters(x)
        before, more = _places_of_warps(_reach(a, b, c, d, t))
        _keep(to, x, first + own_at, t, place + before, CAP)
        place += more
    begin += stretch * WARPS
    if begin < end:
        at = begin + fours(ROWS, WARPS)
        x = read(source, at, end)
        a, b, c, d = _quarters(x)
        before, more = _places(_reach(a, b, c, d, t))
        _keep(to, x, at + tl.arange(0, 4), t, num + before, CAP)
        num += more
    # Up to whole fours: nothing.
    behind = num + tl.arange(0, 4)
    nothing = _pair(tl.full([4], float("-inf"), tl.float32), behind)
    tl.store(to + behind, nothing, behind < tl.minimum((num + 3) // 4 * 4, CAP))
    tl.store(kept_counts + row * SPANS + span, num)


@dataclass(frozen=True, slots=True)
class Tile:
    """How rows are cut: a piece has as many lines of 128 as rows times warps."""

    rows: int  # of the piece that is chosen from, in registers
    warps: int  # more where k needs them
    registers: int  # of a thread: with fewer, more programs are on a multiprocessor at once
    spans: int  # of a longer row; each has a program to sieve it
    sieve_rows: int
    sieve_warps: int
    sieve_registers: int
    sample_rows: int  # what the sieve looks at first


def tile_for(num_rows: int, width: int) -> Tile:
    """What is fast on a card of some 130 multiprocessors. Of a million scores, the best thousands
    are seldom in a small sample."""
    wide = 1 if width <= 1 << 18 else 2
    if num_rows > 128:
        return Tile(8, 8, 128, 1, 4, 8, 64, 4 * wide)
    return Tile(4, 16, 64, 2 if num_rows > 32 else 8, 4, 16, 64, 2 * wide)


def select(
    scores: torch.Tensor,  # [T, L] float32
    counts: torch.Tensor,  # [T] int32 or int64: row t has scores[t, : counts[t]]
    k: int,
    out: torch.Tensor,  # [T, k] int32
    *,
    all_scored: bool = False,
    tile: Tile | None = None,
) -> None:
    """out[t]: the columns of row t's k best, ascending, -1 behind them.

    A row with no more than k scores has all its columns chosen without its scores being read,
    unless `all_scored`: then a score of -inf is never chosen.
    """
    num_rows, width = scores.shape
    if num_rows == 0:
        return
    if scores.stride(0) % 4 or scores.stride(0) < width:
        scores = functional.pad(scores, (0, -width % 16))
    tile = tile or tile_for(num_rows, width)
    rows, warps = tile.rows, tile.warps
    while rows * warps * 128 < min(2 * k, width):
        rows, warps = (rows, warps * 2) if warps < 32 else (rows * 2, warps)
    cap = rows * warps * 128
    spans = tile.spans if width > cap else 0
    kept = torch.empty((num_rows, spans, cap), dtype=torch.int64, device=scores.device)
    kept_counts = kept.new_empty((num_rows, spans), dtype=torch.int32)
    if spans:
        _sieve[(num_rows, spans)](
            scores, counts, kept, kept_counts, k, scores.stride(0), CAP=cap,
            SPANS=spans, ROWS=tile.sieve_rows, WARPS=tile.sieve_warps,
            SAMPLE_ROWS=tile.sample_rows,
            num_warps=tile.sieve_warps, maxnreg=tile.sieve_registers,
        )  # fmt: skip
    _choose[(num_rows,)](
        scores, counts, kept, kept_counts, out, k, scores.stride(0), out.stride(0),
        ALL_SCORED=all_scored, SPANS=spans, ROWS=rows, WARPS=warps,
        num_warps=warps, maxnreg=min(tile.registers, 2048 // warps),
    )  # fmt: skip


def exact_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores [T, L] float32, k <= L -> int64 [T, k]"""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    out = torch.empty((len(scores), k), dtype=torch.int32, device=scores.device)
    counts = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device)
    select(scores, counts, k, out, all_scored=True)
    return out.long()
