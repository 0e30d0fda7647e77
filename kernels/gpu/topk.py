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

from kernels.gpu.kth import NOTHING, key_of, kth, shared_counts
from kernels.gpu.pieces import fours, places, places_of_warps, quarters, read, store
from kernels.gpu.sieve import kept_at, parts, sieve


@triton.jit
def _first(ones, limit):
    """The first `limit` of the ones; how many there are in all."""
    place, num = places(tl.sum(ones, axis=3))
    place = place[:, :, :, None] + tl.cumsum(ones, axis=3) - ones
    return tl.where(place < limit, ones, 0), num


@triton.jit
def _write(to, key, position, least, has_ties, room, num):
    """Store the positions of the keys above `least`, and of the first `room` that equal it if
    `has_ties`, of all otherwise, behind `num` others. Returns how much room is left, and the places
    behind each warp's."""
    ones = (key >= least).to(tl.int32)
    if has_ties:
        tied, num_tied = _first((key == least).to(tl.int32), room)
        ones = (key > least).to(tl.int32) + tied
        room -= num_tied
    before, warps = places_of_warps(tl.sum(ones, axis=3))
    upto = num + tl.cumsum(warps, axis=1)
    a, b, c, d = quarters(position)
    i, j, m, p = quarters(ones)
    store(to, a, b, c, d, i == 1, j == 1, m == 1, p == 1, upto - warps + before)
    return room, upto


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
    if IS_LONG:
        num = n * 0
        for first in range(0, n, key.numel):
            key = key_of(read(source, first + at, n))
            where = first + at + tl.arange(0, 4)
            room, upto = _write(to, key, where, least, has_ties, room, num)
            num = tl.max(upto)
    else:
        _, upto = _write(to, key, position, least, has_ties, room, 0)
        num = k
        if (n <= k) | (low < least):  # some are -inf, perhaps
            num = tl.max(upto)
    return num


@triton.jit(do_not_specialize=["k", "width"])
def _choose(
    scores,  # [rows, score_stride] float32
    counts,  # [rows]: how many scores each row has
    kept,  # [rows, SPANS, size of a piece] int64: pairs that the sieve kept of longer rows
    kept_counts,  # [rows, SPANS]
    out,  # [rows, out_stride] int32
    k,
    width,  # at least all of `counts`
    score_stride,
    out_stride,
    ALL_SCORED: tl.constexpr,  # rows with no more than k scores have them read, too
    SPANS: tl.constexpr,  # of the sieve; 0: no row has more than a piece
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = scores + row * score_stride
    at = fours(ROWS, WARPS)
    position = at + tl.arange(0, 4)
    if SPANS == 0:
        x = read(source, at, width)  # on its way before n is known
    n = tl.load(counts + row).to(tl.int32)
    to = out + row * out_stride
    if (n <= k) & (not ALL_SCORED):
        for first in range(0, k, 1024):
            slot = first + tl.arange(0, 1024)
            tl.store(to + slot, tl.where(slot < n, slot, -1), mask=slot < k)
        return
    shared = shared_counts(n * 0)
    if SPANS == 0:
        key = key_of(tl.where(position < n, x, float("-inf")))
        num = _choose_from(shared, key, position, source, at, n, k, to, False)
    else:
        size: tl.constexpr = ROWS * WARPS * 128
        # Any row has memory for a piece, and so has what is kept of it.
        own, own_counts = kept + row * (SPANS * size), kept_counts + row * SPANS
        num_real, num_held = n, n
        x = tl.load(source + position)
        if n > size:
            where, num_real, num_held = kept_at(at, own_counts, size, SPANS)
            x, position = parts(tl.load(own + where + tl.arange(0, 4)))
        key = key_of(tl.where(at + tl.arange(0, 4) < num_held, x, float("-inf")))
        if (n > size) & ((num_real < k) | (num_held > size - 4)):
            num = _choose_from(shared, key, position, source, at, n, k, to, True)
        else:
            num = _choose_from(shared, key, position, source, at, num_held, k, to, False)
    for first in range(num, k, 1024):
        slot = first + tl.arange(0, 1024)
        tl.store(to + slot, -1, mask=slot < k)


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
    stages: int = 3  # pieces that are on their way or sieved at a time


def tile_for(num_rows: int, width: int) -> Tile:
    """What is fast on a card of some 130 multiprocessors. Of a million scores, the best thousands
    are seldom in a small sample."""
    wide = 1 if width <= 1 << 18 else 2
    if num_rows > 128:
        rows, registers = (4, 80) if 8192 < width <= 1 << 16 else (8, 128)
        return Tile(rows, 8, registers, 1, 4, 8, 64, 4 * wide)
    return Tile(4, 16, 96, 2 if num_rows > 32 else 8, 4, 8, 64, 2 * wide)


def _cut(tile: Tile, width: int, k: int) -> tuple[int, int, int]:
    """Rows and warps of the piece that is chosen from, which has twice as many elements as are
    chosen; spans of the sieve before it, 0 where all of a row fits."""
    rows, warps = tile.rows, tile.warps
    while rows * warps * 128 < min(2 * k, width):
        rows, warps = (rows, warps * 2) if warps < 32 else (rows * 2, warps)
    return rows, warps, tile.spans if width > rows * warps * 128 else 0


def kept_bytes(num_rows: int, width: int, k: int) -> int:
    """Of memory that `select` takes for each of so many rows."""
    rows, warps, spans = _cut(tile_for(num_rows, width), width, k)
    return 8 * spans * rows * warps * 128


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
    if scores.stride(0) % 16 or scores.stride(0) < width or scores.data_ptr() % 16:
        scores = functional.pad(scores, (0, -width % 16))
    tile = tile or tile_for(num_rows, width)
    rows, warps, spans = _cut(tile, width, k)
    cap = rows * warps * 128
    kept = torch.empty((num_rows, spans, cap), dtype=torch.int64, device=scores.device)
    kept_counts = kept.new_empty((num_rows, spans), dtype=torch.int32)
    if spans:
        sieve[(num_rows, spans)](
            scores, counts, kept, kept_counts, k, scores.stride(0), CAP=cap,
            SPANS=spans, ROWS=tile.sieve_rows, WARPS=tile.sieve_warps,
            SAMPLE_ROWS=tile.sample_rows, STAGES=tile.stages,
            num_warps=tile.sieve_warps, maxnreg=tile.sieve_registers,
        )  # fmt: skip
    _choose[(num_rows,)](
        scores, counts, kept, kept_counts, out, k, width, scores.stride(0), out.stride(0),
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
