"""Exact top-k against a stable sort."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.gpu.topk import Tile, exact_topk, select

WHOLE = Tile(4, 2, 64, 1, 4, 2, 64, 4)  # rows of up to 1024 in registers
SIEVED = Tile(1, 1, 64, 1, 1, 1, 64, 1)  # of up to 128
SPANNED = Tile(1, 2, 64, 3, 2, 1, 64, 1)
TALL = Tile(8, 1, 128, 1, 8, 1, 128, 8)
TILES = [WHOLE, SIEVED, SPANNED, TALL]
LOWEST = torch.finfo(torch.float32).min
KINDS = [
    "normal", "tied", "equal", "zeros", "skewed", "denormal", "periodic", "late", "rising",
    "with -inf", "with inf", "only -inf",
]  # fmt: skip


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
@pytest.mark.parametrize("width, k", [(1, 1), (40, 7), (65, 65)])
def test_rows(kind: str, width: int, k: int, device: torch.device) -> None:
    scores = draw(kind, 2, width, device)
    found = exact_topk(scores, k)
    assert found.dtype == torch.int64
    assert found.tolist() == [by_sorting(row, k) for row in scores.cpu()]


def test_columns_that_are_not_neighbours(device: torch.device) -> None:
    scores = draw("tied", 40, 3, device).t()
    assert exact_topk(scores, 9).tolist() == [by_sorting(row, 9) for row in scores.cpu()]


@pytest.mark.parametrize("kind, tile", list(zip(KINDS, 3 * TILES, strict=True)))
def test_lengths_of_their_own(kind: str, tile: Tile, device: torch.device) -> None:
    """Rows of one table, in which other scores lie behind each row's, and behind those a gap."""
    k, width = 24, 600
    lengths = [width, 0, 1, k, k + 1, 131, 258]
    table = torch.full((len(lengths), 640), torch.nan, device=device)
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
    select(scores, counts, 40, out, tile=SIEVED)
    assert out.tolist() == [list(range(n)) + [-1] * (40 - n) for n in (0, 7, 40)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", [1, 100, 299])
def test_every_size_of_a_choice(tile: Tile, k: int, device: torch.device) -> None:
    scores = draw("tied", 2, 300, device)
    out = torch.full((2, k), 99, dtype=torch.int32, device=device)
    select(scores, torch.tensor([300, 290], device=device), k, out, tile=tile)
    assert out.tolist() == [by_sorting(scores[0].cpu(), k), by_sorting(scores[1, :290].cpu(), k)]


def seen_of(width: int) -> list[int]:
    """Columns that a sample of 128 sees: one of each share."""
    share = width // 128
    return [i * share + (i * 2654435769 % 2**32 * share >> 32) for i in range(128)]


@pytest.mark.parametrize("spans", [1, 4])
@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("k", [3, 60])
def test_a_sample_that_misleads(spans: int, hides: bool, k: int, device: torch.device) -> None:
    """It sees none of the best, so that too much is kept, or nothing but the best, so that too
    little is: of three best two, which are a whole four with what fills it up."""
    tile = Tile(1, 1, 64, spans, 1, 1, 64, 1)
    width = 2048
    seen = seen_of(width)
    scores = draw("normal", 1, width, device)
    is_seen = torch.zeros(width, dtype=torch.bool, device=device)
    is_seen[seen] = True
    scores += torch.where(is_seen == hides, 0.0, 100.0)
    assert scores[0, seen].max() < 50 if hides else scores[0, seen].min() > 50
    out = torch.full((1, k), 99, dtype=torch.int32, device=device)
    select(scores, torch.tensor([width], device=device), k, out, tile=tile)
    assert out[0].tolist() == by_sorting(scores[0].cpu(), k)


@pytest.mark.parametrize("num", range(123, 130))
def test_what_is_kept_may_just_fit(num: int, device: torch.device) -> None:
    """So many reach what the sample says, where there is room for 128."""
    width, k = 2048, 60
    seen = seen_of(width)
    scores = torch.zeros(1, width, device=device)
    scores[0, seen[::16]] = 1.0
    unseen = sorted(set(range(0, width, 8)) - set(seen))[8 - num :]
    scores[0, unseen] = torch.linspace(2, 3, num - 8, device=device)
    out = torch.full((1, k), 99, dtype=torch.int32, device=device)
    select(scores, torch.tensor([width], device=device), k, out, tile=SIEVED)
    assert out[0].tolist() == by_sorting(scores[0].cpu(), k)


def test_rows_that_do_not_begin_at_whole_sectors(device: torch.device) -> None:
    scores = draw("normal", 3, 301, device)
    choose = partial(select, scores, torch.tensor([301, 300, 299], device=device), 20)
    for tile in TILES:
        out = torch.full((3, 20), 99, dtype=torch.int32, device=device)
        choose(out, tile=tile)
        assert out.tolist() == [by_sorting(scores[i, : 301 - i].cpu(), 20) for i in range(3)]
