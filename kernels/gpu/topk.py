"""Exact top-k of each row by score descending, then position ascending. The specification is
kernels.topk.

A program holds a piece of a row in registers, and finds its k-th best by counting. Of a longer row
what may be among the best of each piece is kept, in order, and chosen from again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels.gpu.kth import NOTHING, key_of, kth, no_counts, shared_memory
from kernels.gpu.pieces import elements, fours, places, quarters, read, store


@triton.jit
def _best(shared, key, a, b, c, d, k, TIME, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """The k best of more than k keys, a to d: those that are not chosen do not reach the k-th,
    which is returned, too. Of those that equal it the first are chosen."""
    least, reach, above = kth(shared, key, k)
    if (reach > k) & (least > NOTHING):
        i, j, m, p = a == least, b == least, c == least, d == least
        place, _ = places(shared, i, j, m, p, TIME, ROWS, WARPS)
        room = k - above - place
        a = tl.where(i & (room <= 0), 0, a)
        room -= i.to(tl.int32)
        b = tl.where(j & (room <= 0), 0, b)
        room -= j.to(tl.int32)
        c = tl.where(m & (room <= 0), 0, c)
        room -= m.to(tl.int32)
        d = tl.where(p & (room <= 0), 0, d)
    return a, b, c, d, least


@triton.jit
def _fill(to, begin, end, what):
    for first in range(begin, end, 1024):
        slot = first + tl.arange(0, 1024)
        tl.store(to + slot, what, mask=slot < end)


@triton.jit
def _choose_all(to, n, k):
    for first in range(0, k, 1024):
        slot = first + tl.arange(0, 1024)
        tl.store(to + slot, tl.where(slot < n, slot, -1), mask=slot < k)


@triton.jit(do_not_specialize=["k", "width"], do_not_specialize_on_alignment=["counts"])
def _choose(
    scores,  # [rows, score_stride] float32, or uint32: keys that were kept of them
    positions,  # [rows, score_stride] int32, of keys; None: scores' columns
    counts,  # [rows]: how many scores each row has; of those kept, -1: all is done
    out,  # [rows, out_stride] int32
    k,
    width,  # at least all of `counts`
    score_stride,
    out_stride,
    ALL_SCORED: tl.constexpr,  # rows with no more than k scores have them read, too
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Of rows of a piece at most."""
    again: tl.constexpr = positions is not None
    row = tl.program_id(0).to(tl.int64)
    source = row * score_stride
    at = elements(ROWS, WARPS)
    n = tl.load(counts + row).to(tl.int32)
    x = read(scores + source, at, width)  # on its way before n is known
    to = out + row * out_stride
    if again:
        if n < 0:
            return
        position = read(positions + source, at, width)
    elif (n <= k) & (not ALL_SCORED):
        _choose_all(to, n, k)
        return
    shared = shared_memory(n * 0)
    no_counts(shared)
    key = x if again else key_of(x)
    if n < at.numel:
        key = tl.where(at < n, key, 0)
    a, b, c, d = quarters(key, ROWS, WARPS)
    least = (n * 0 + NOTHING).to(tl.uint32)
    if n > k:
        a, b, c, d, least = _best(shared, key, a, b, c, d, k, 0, ROWS, WARPS)
    least = tl.maximum(least, NOTHING + 1)
    i, j, m, p = a >= least, b >= least, c >= least, d >= least
    place, num = places(shared, i, j, m, p, 1, ROWS, WARPS)
    if again:
        a, b, c, d = quarters(position, ROWS, WARPS)
        store(to + place, a, b, c, d, i, j, m, p)
    else:
        e = fours(ROWS, WARPS)
        store(to + place, e, e + 1, e + 2, e + 3, i, j, m, p)
    _fill(to, num, k, -1)


@triton.jit(
    do_not_specialize=["k", "cap", "pieces", "kept_stride"],
    do_not_specialize_on_alignment=["counts"],
)
def _keep(
    scores,  # as _choose
    positions,
    counts,
    out,
    kept,  # [rows, kept_stride] uint32
    kept_positions,  # [rows, kept_stride] int32
    kept_counts,  # [rows] int32; -1: of a row that has no more than a piece, which is chosen from
    k,
    cap,  # of a piece are kept at most, or its k best
    pieces,  # that a program goes through
    score_stride,
    kept_stride,
    out_stride,
    ALL_SCORED: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Of each piece what is better than the k-th of one before it."""
    size: tl.constexpr = ROWS * WARPS * 128
    again: tl.constexpr = positions is not None
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    n = tl.load(counts + row).to(tl.int32)
    begin = span * pieces * size
    is_kept = n > size
    num_spans = tl.where(is_kept, tl.cdiv(n, pieces * size), 0)
    share = pieces * cap  # of what is kept
    if (span == 0) & (num_spans != 1):
        tl.store(kept_counts + row, tl.where(is_kept, num_spans * share, -1))
    if ((n <= begin) & (span > 0)) | (n < 0):
        return
    keys_to = kept + row * kept_stride + span * share
    to = out + row * out_stride
    if is_kept:
        to = kept_positions + row * kept_stride + span * share
    else:
        cap = k
    if (n <= k) & (not again) & (not ALL_SCORED):
        _choose_all(to, n, k)
        return
    shared = shared_memory(n * 0)
    source = row * score_stride
    at = elements(ROWS, WARPS)
    least = (n * 0 + NOTHING).to(tl.uint32)  # only better ones can be among the k best
    total = n * 0
    for first in range(begin, tl.minimum(begin + pieces * size, n), size):
        x = read(scores + source + first, at, n - first)
        no_counts(shared)
        key = x if again else key_of(x)
        if first + size > n:
            key = tl.where(first + at < n, key, 0)
        a, b, c, d = quarters(key, ROWS, WARPS)
        i, j, m, p = a > least, b > least, c > least, d > least
        num = n
        if (not is_kept) | (first > begin):
            place, num = places(shared, i, j, m, p, 0, ROWS, WARPS)
        else:
            place = tl.zeros(a.shape, tl.int32)
        if num > cap:
            a, b, c, d, some = _best(shared, key, a, b, c, d, k, 1, ROWS, WARPS)
            least = tl.maximum(some, least)
            some = tl.maximum(some, NOTHING + 1)
            i, j, m, p = a >= some, b >= some, c >= some, d >= some
            place, num = places(shared, i, j, m, p, 2, ROWS, WARPS)
        place += total
        store(keys_to + place, a, b, c, d, i, j, m, p)
        if again:
            a, b, c, d = quarters(read(positions + source + first, at, n - first), ROWS, WARPS)
            store(to + place, a, b, c, d, i, j, m, p)
        else:
            e = first + fours(ROWS, WARPS)
            store(to + place, e, e + 1, e + 2, e + 3, i, j, m, p)
        total += num
    if num_spans == 1:
        tl.store(kept_counts + row, total)
    else:
        _fill(to, total, tl.where(is_kept, share, k), -1)
        if is_kept:
            _fill(keys_to, total, share, 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """A piece has as many lines of 128 as rows times warps."""

    rows: int
    warps: int
    registers: int  # of a thread: with fewer, more programs are on a multiprocessor at once
    programs: int = 128  # that long rows are given to, if there are fewer rows

    @property
    def size(self) -> int:
        return self.rows * self.warps * 128


def tile_for(num_rows: int, width: int) -> Tile:
    """What is fast on a card of some 130 multiprocessors."""
    if width <= 8192:
        return Tile(8, 8, 64)
    if width <= 16384:
        return Tile(8, 16, 64)
    if width <= 32768:
        return Tile(16, 16, 128)
    return Tile(4, 32, 64) if num_rows <= 32 else Tile(8, 32, 64)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How rows are cut into pieces, and what is kept of them."""

    tile: Tile
    spans: int  # of a row; each has a program
    pieces: int  # of a span
    cap: int  # of a piece, of which its k best are not looked for

    @classmethod
    def of(cls, tile: Tile, num_rows: int, width: int, k: int) -> _Cut:
        """Of a piece no more than half is kept, so that every round leaves less of a row."""
        while tile.size < min(2 * k, width):
            more = {"warps": tile.warps * 2} if tile.warps < 32 else {"rows": tile.rows * 2}
            tile = replace(tile, **more)
        tile = replace(tile, registers=min(tile.registers, 2048 // tile.warps))
        num = triton.cdiv(width, tile.size)
        pieces = triton.cdiv(num, max(1, tile.programs // num_rows))
        cap = k if pieces == 1 else min(k + k // 4 + 32, tile.size // 2)
        return cls(tile, triton.cdiv(num, pieces), pieces, cap)

    @property
    def num_kept(self) -> int:
        """Of a row, 0: all is chosen from at once."""
        return self.spans * self.pieces * self.cap if self.spans * self.pieces > 1 else 0


def kept_bytes(num_rows: int, width: int, k: int) -> int:
    """Of memory that `select` takes for each of so many rows."""
    return 8 * _stride(_Cut.of(tile_for(num_rows, width), num_rows, width, k).num_kept)


def _stride(num: int) -> int:
    return -(-num // 16) * 16  # rows begin at whole sectors of memory


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
    if num_rows == 0 or k == 0:
        return
    if scores.stride(0) % 16 or scores.stride(0) < width or scores.data_ptr() % 16:
        scores = functional.pad(scores, (0, -width % 16))
    positions = None
    while True:
        cut = _Cut.of(tile or tile_for(num_rows, width), num_rows, width, k)
        form = {
            "ALL_SCORED": all_scored,
            "ROWS": cut.tile.rows,
            "WARPS": cut.tile.warps,
            "num_warps": cut.tile.warps,
            "maxnreg": cut.tile.registers,
        }
        if not cut.num_kept:
            _choose[(num_rows,)](
                scores, positions, counts, out, k, width, scores.stride(0), out.stride(0), **form
            )
            return
        kept = torch.empty(
            (num_rows, _stride(cut.num_kept)), dtype=torch.uint32, device=scores.device
        )
        kept_positions = torch.empty_like(kept, dtype=torch.int32)
        kept_counts = torch.empty_like(counts, dtype=torch.int32)
        _keep[(num_rows, cut.spans)](
            scores, positions, counts, out, kept, kept_positions, kept_counts,
            k, cut.cap, cut.pieces, scores.stride(0), kept.stride(0), out.stride(0), **form,
        )  # fmt: skip
        scores, positions, counts, width = kept, kept_positions, kept_counts, cut.num_kept


def exact_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores [T, L] float32, k <= L -> int64 [T, k]"""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    out = torch.empty((len(scores), k), dtype=torch.int32, device=scores.device)
    counts = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device)
    select(scores, counts, k, out, all_scored=True)
    return out.long()
