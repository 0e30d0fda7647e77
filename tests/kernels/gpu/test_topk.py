"""Exact top-k against a stable sort."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu.pieces import elements, read
from kernels.gpu.topk import Tile, exact_topk, select

WHOLE = Tile(4, 2, 64)  # rows of up to 1024 are one piece
SMALL = Tile(1, 1, 64)  # a program has a piece of 128
LONG = Tile(1, 1, 64, programs=1)  # all pieces of a row
WIDE = Tile(1, 2, 64, programs=4)
TALL = Tile(8, 1, 128, programs=1)
TILES = [WHOLE, SMALL, LONG, WIDE, TALL]
LOWEST = torch.finfo(torch.float32).min
KINDS = [
    "normal", "tied", "equal", "zeros", "skewed", "denormal", "periodic", "late", "rising",
    "with -inf", "with inf", "only -inf",
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance() -> Iterator[None]:
    """Memory that is not yet written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_sorting(row: torch.Tensor, k: int) -> list[int]:
    """Columns of the k best, ascending, -1 behind them; -inf is never chosen."""
    order = (row + 0.0).sort(descending=True, stable=True).indices[:k]
    chosen = order[row[order] > -torch.inf].sort().values.tolist()
    return chosen + [-1] * (k - len(chosen))


def draw(kind: str, rows: int, width: int, device: torch.device) -> torch.Tensor:
    scores = torch.randn(rows, width, device=device)
    column = torch.arange(width, device=device)
    some = torch.rand_like(scores)
    forms = {
        "normal": lambda: scores,
        "tied": lambda: (scores * 1.5).round() * torch.where(scores > 1, -0.0, 1.0),
        "equal": lambda: torch.full_like(scores, -3.0),
        "zeros": lambda: torch.where(scores > 0, -0.0, 0.0),
        "skewed": lambda: scores.abs() ** 9 * 1e-20,
        "denormal": lambda: scores * 1e-44,
        "periodic": lambda: scores + 50 * (column % 16 == 3),
        "late": lambda: scores + 1e4 * (column >= width - width // 8),
        "rising": lambda: column + scores / 8,
        # Few others, most of them the lowest that there is
        "with -inf": lambda: torch.where(some < 0.9, -torch.inf, scores + LOWEST * (scores < 1)),
        "with inf": lambda: torch.where(some < 0.2, torch.inf, scores * 1e38),
        "only -inf": lambda: torch.full_like(scores, -torch.inf),
    }
    return forms[kind]()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width, k", [(5, 0), (1, 1), (40, 7), (65, 65)])
def test_rows(kind: str, width: int, k: int, device: torch.device) -> None:
    scores = draw(kind, 2, width, device)
    found = exact_topk(scores, k)
    assert found.dtype == torch.int64
    assert found.tolist() == [by_sorting(row, k) for row in scores.cpu()]


def test_columns_that_are_not_neighbours(device: torch.device) -> None:
    scores = draw("tied", 40, 3, device).t()
    assert exact_topk(scores, 9).tolist() == [by_sorting(row, 9) for row in scores.cpu()]


@pytest.mark.parametrize("kind, tile", list(zip(KINDS, 3 * TILES[:4], strict=True)))
def test_lengths_of_their_own(kind: str, tile: Tile, device: torch.device) -> None:
    """Rows of one table, in which other scores lie behind each row's, and behind those a gap."""
    k, width = 24, 400
    lengths = [width, 0, 1, k, k + 1, 128, 131, 256, 258]  # some of a whole piece
    table = torch.full((len(lengths), 448), torch.nan, device=device)
    table[:, :width] = draw(kind, len(lengths), width, device)
    for row, length in zip(table, lengths, strict=True):
        row[length:] = torch.nan  # not one of the scores
    counts = torch.tensor(lengths, device=device)
    pairs = list(zip(table.cpu(), lengths, strict=True))
    some = [by_sorting(row[:n], k) for row, n in pairs]
    for all_scored in (False, True):
        out = torch.full((len(lengths), k), 99, dtype=torch.int32, device=device)
        select(table[:, :width], counts, k, out, all_scored=all_scored, tile=tile)
        for i, n in enumerate(lengths):
            whole = n <= k and not all_scored
            assert out[i].tolist() == (list(range(n)) + [-1] * (k - n) if whole else some[i])


def test_rows_without_a_choice_are_not_read(device: torch.device) -> None:
    scores = torch.full((3, 300), torch.nan, device=device)
    out = torch.full((3, 40), 99, dtype=torch.int32, device=device)
    counts = torch.tensor([0, 7, 40], device=device)
    select(scores, counts, 40, out, tile=SMALL)
    assert out.tolist() == [list(range(n)) + [-1] * (40 - n) for n in (0, 7, 40)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", [1, 100, 299])
def test_every_size_of_a_choice(tile: Tile, k: int, device: torch.device) -> None:
    scores = draw("tied", 2, 300, device)
    out = torch.full((2, k), 99, dtype=torch.int32, device=device)
    select(scores, torch.tensor([300, 290], device=device), k, out, tile=tile)
    assert out.tolist() == [by_sorting(scores[0].cpu(), k), by_sorting(scores[1, :290].cpu(), k)]


@triton.jit(do_not_specialize=["n"])
def _read_numbers(numbers, out, n, ROWS: tl.constexpr, WARPS: tl.constexpr):
    at = elements(ROWS, WARPS)
    tl.store(out + at, read(numbers, at, n))


@pytest.mark.parametrize("n", [0, 1, 4, 255, 508, 512])
def test_nothing_is_read_beyond_the_last_four(n: int, device: torch.device) -> None:
    numbers = torch.arange(512, dtype=torch.int32, device=device)
    out = torch.full_like(numbers, -1)
    _read_numbers[(1,)](numbers, out, n, ROWS=2, WARPS=2, num_warps=2)
    assert out[:n].tolist() == list(range(n))
    assert int(out.min()) >= 0 and int(out.max()) < max(4, -(-n // 4) * 4)


def test_rows_that_do_not_begin_at_whole_sectors(device: torch.device) -> None:
    scores = draw("normal", 3, 301, device)
    choose = partial(select, scores, torch.tensor([301, 300, 299], device=device), 20)
    for tile in TILES:
        out = torch.full((3, 20), 99, dtype=torch.int32, device=device)
        choose(out, tile=tile)
        assert out.tolist() == [by_sorting(scores[i, : 301 - i].cpu(), 20) for i in range(3)]
