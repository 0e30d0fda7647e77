"""Exact top-k against a stable sort."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.topk import Tile, exact_topk, select, select_sieved

SMALL = Tile(group=16, piece=(4, 8))


def by_sorting(row: torch.Tensor, k: int) -> list[int]:
    """Columns of the k best, ascending, -1 behind them; -inf is never chosen."""
    order = (row + 0.0).sort(descending=True, stable=True).indices[:k]
    chosen = order[row[order] > -torch.inf].sort().values.tolist()
    return chosen + [-1] * (k - len(chosen))


def draw(kind: str, rows: int, width: int, device: torch.device) -> torch.Tensor:
    scores = torch.randn(rows, width, device=device)
    if kind == "tied":
        return (scores * 1.5).round() * torch.where(scores > 1, -0.0, 1.0)
    if kind == "equal":
        return torch.full_like(scores, -3.0)
    if kind == "skewed":
        return scores.abs() ** 9 * 1e-20
    if kind == "with -inf":
        return torch.where(torch.rand_like(scores) < 0.9, -torch.inf, scores)
    return scores


@pytest.mark.parametrize("kind", ["normal", "tied", "equal", "skewed", "with -inf"])
@pytest.mark.parametrize("width, k", [(1, 1), (40, 7), (64, 64)])
def test_rows(kind: str, width: int, k: int, device: torch.device) -> None:
    scores = draw(kind, 2, width, device)
    found = exact_topk(scores, k)
    assert found.dtype == torch.int64
    assert found.tolist() == [by_sorting(row, k) for row in scores.cpu()]


@pytest.mark.parametrize("kind", ["normal", "tied"])
def test_rows_of_many_groups(kind: str, device: torch.device) -> None:
    """Rows of different lengths in one table, selected in groups of 16 over several levels."""
    scores = draw(kind, 5, 50, device)
    counts = torch.tensor([50, 0, 3, 5, 17], device=device)
    for row, count in zip(scores, counts.tolist(), strict=True):
        row[count:] = torch.nan  # never read
        if count <= 5:
            row[:] = -torch.inf  # nor these, of which none would be chosen
    out = torch.full((5, 5), 99, dtype=torch.int32, device=device)
    select(scores, counts, 5, out, tile=SMALL)
    some = [by_sorting(scores[i, :n].cpu(), 5) for i, n in ((0, 50), (4, 17))]
    all_of_them = [list(range(n)) + [-1] * (5 - n) for n in (0, 3, 5)]
    assert out.tolist() == [some[0], *all_of_them, *some[1:]]


def test_minus_infinity_over_several_levels(device: torch.device) -> None:
    scores = draw("with -inf", 3, 40, device)
    scores[1] = -torch.inf
    scores[2, 10:] = -torch.inf
    out = torch.full((3, 6), 99, dtype=torch.int32, device=device)
    counts = torch.full((3,), 40, device=device)
    select(scores, counts, 6, out, all_scored=True, tile=SMALL)
    assert out.tolist() == [by_sorting(row, 6) for row in scores.cpu()]


def test_the_sieve_leaves_alone_what_it_cannot_serve(device: torch.device) -> None:
    tile = Tile(group=256, piece=(8, 16), per_sampled=2)
    kinds = ("normal", "equal", "skewed", "normal")
    scores = torch.cat([draw(kind, 1, 512, device) for kind in kinds])
    counts = torch.tensor([512, 512, 500, 512], device=device)
    # All of the 60 best are in the sample, which takes them for the best of 120.
    scores[3, [2 * i + (i * 2654435769 % 2**32 >> 8) % 2 for i in range(100, 160)]] += 20
    scores[2, 500:] = torch.nan
    want = [by_sorting(scores[i, :n].cpu(), 64) for i, n in enumerate(counts.tolist())]
    out = torch.full((4, 64), 99, dtype=torch.int32, device=device)
    assert select_sieved(scores, counts, 64, out, tile).tolist() == [-1, 512, -1, 512]
    assert [out[0].tolist(), out[2].tolist()] == [want[0], want[2]]
    assert out[1].tolist() == out[3].tolist() == [99] * 64
    select(scores, counts, 64, out, tile=tile, sieves=True)
    assert out.tolist() == want
