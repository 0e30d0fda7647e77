"""The map from pages and locs to rows: checked vectors, the bijection, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.sharding import CpSharedKVLayout

Make = Callable[[Any], Any]
both_libraries = pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["torch", "numpy"])


@both_libraries
def test_owner_and_row_page_of_four_ranks(make: Make) -> None:
    layout = CpSharedKVLayout(64, 4)
    pages = make([0, 1, 2, 3, 4, 5, 8, 9])
    assert layout.owner(pages).tolist() == [-1, 0, 1, 2, 3, 0, 3, 0]
    assert layout.row_page(pages).tolist() == [0, 1, 1, 1, 1, 2, 2, 3]


@both_libraries
def test_only_the_owned_loc_of_rank_2_has_a_row_there(make: Make) -> None:
    layout = CpSharedKVLayout(64, 4, 2)
    locs = make([0, 64, 128, 192, 256, 320, 384])
    owned = layout.owned_by_this_rank(locs)
    assert locs[owned].tolist() == [192]
    assert layout.row(locs[owned]).tolist() == [64]


@both_libraries
@pytest.mark.parametrize(
    ("rank", "pages", "first_position", "row_pages", "positions"),
    [
        (1, range(1, 10), 10, [1, 2], [11, 15]),
        (2, range(9, 16), 8, [3, 4], [10, 14]),
        (2, range(9, 15), 8, [3], [10]),
        (3, range(1, 4), 0, [], []),
        (0, [0, 5, 0, 1], 0, [2, 1], [1, 3]),  # padding is nobody's; order is kept
    ],
)
def test_filter_owned_pages(
    make: Make,
    rank: int,
    pages: list[int],
    first_position: int,
    row_pages: list[int],
    positions: list[int],
) -> None:
    at = make(list(range(first_position, first_position + len(pages))))
    found = CpSharedKVLayout(64, 4, rank).filter_owned_pages(make(list(pages)), at)
    assert [part.tolist() for part in found] == [row_pages, positions]


@both_libraries
def test_empty_arrays_stay_empty(make: Make) -> None:
    layout = CpSharedKVLayout(64, 4, 1)
    none = make([0])[:0]
    assert layout.row(none).tolist() == layout.owner(none).tolist() == []
    assert [part.tolist() for part in layout.filter_owned_pages(none, none)] == [[], []]


@both_libraries
def test_shapes_are_kept_and_the_input_is_not_written(make: Make) -> None:
    layout = CpSharedKVLayout(2, 2)
    locs = make([[0, 1, 2], [3, 4, 9]])
    assert layout.row(locs).tolist() == [[0, 1, 2], [3, 2, 5]]
    assert locs.tolist() == [[0, 1, 2], [3, 4, 9]]


@both_libraries
@given(page_size=st.integers(1, 70), locs=st.lists(st.integers(0, 2**40), min_size=1))
@settings(deadline=None)
def test_with_one_rank_rows_are_locs(make: Make, page_size: int, locs: list[int]) -> None:
    layout = CpSharedKVLayout(page_size)
    assert layout.row(make(locs)).tolist() == locs
    owned = [loc >= page_size for loc in locs]
    assert layout.owned_by_this_rank(make(locs)).tolist() == owned


@pytest.mark.parametrize("cp_size", range(1, 17))
@given(page_size=st.integers(1, 65), rows_per_rank=st.integers(1, 9))
@settings(deadline=None, max_examples=20)
def test_pages_and_rows_are_in_bijection(cp_size: int, page_size: int, rows_per_rank: int) -> None:
    pages = torch.arange(1, cp_size * rows_per_rank + 1)
    layout = CpSharedKVLayout(page_size, cp_size)
    places = zip(layout.owner(pages).tolist(), layout.row_page(pages).tolist(), strict=True)
    wanted = {(rank, row) for rank in range(cp_size) for row in range(1, rows_per_rank + 1)}
    assert set(places) == wanted
    assert len(pages) == len(wanted)

    # Every loc of a rank's pages lands on its own row, and the ranks' shares are disjoint.
    locs = torch.arange(page_size, (len(pages) + 1) * page_size)
    num_owned = torch.zeros_like(locs)
    for rank in range(cp_size):
        shard = CpSharedKVLayout(page_size, cp_size, rank)
        owned = shard.owned_by_this_rank(locs)
        num_owned += owned
        rows = shard.row(locs[owned])
        assert sorted(rows.tolist()) == list(range(page_size, (rows_per_rank + 1) * page_size))
        assert torch.equal(rows % page_size, locs[owned] % page_size)
    assert torch.all(num_owned == 1)


@given(cp_size=st.integers(1, 16), pages=st.lists(st.integers(1, 10**6), unique=True, max_size=40))
@settings(deadline=None)
def test_the_ranks_shares_are_the_requests_pages(cp_size: int, pages: list[int]) -> None:
    positions = np.arange(len(pages))
    found: dict[int, int] = {}
    for rank in range(cp_size):
        layout = CpSharedKVLayout(64, cp_size, rank)
        row_pages, at = layout.filter_owned_pages(np.array(pages, dtype=np.int64), positions)
        for row_page, position in zip(row_pages.tolist(), at.tolist(), strict=True):
            assert position not in found
            found[position] = (row_page - 1) * cp_size + rank + 1
    assert [found[position] for position in range(len(pages))] == pages


def test_sizes_of_a_group_are_those_of_a_rank_times_the_ranks() -> None:
    layout = CpSharedKVLayout(64, 4)
    assert layout.logical_size(640) == 2560
    assert layout.physical_size(2560) == 640
    layout.check_sizes(2560, 640)


@pytest.mark.parametrize(
    ("logical", "physical", "named"),
    [(2560, 641, "641"), (2560, -64, "-64"), (2496, 640, "2496"), (640, 640, "2560")],
)
def test_sizes_that_do_not_fit_are_refused(logical: int, physical: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CpSharedKVLayout(64, 4).check_sizes(logical, physical)


def test_a_logical_size_that_gives_ranks_unequal_shares_is_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 256 tokens.* got 320"):
        CpSharedKVLayout(64, 4).physical_size(320)


@pytest.mark.parametrize(
    ("page_size", "cp_size", "cp_rank", "message"),
    [
        (0, 1, 0, "page_size must be positive, got 0"),
        (-64, 1, 0, "page_size must be positive, got -64"),
        (64, 0, 0, "cp_size must be positive, got 0"),
        (64, 4, 4, "cp_rank .* got 4 with cp_size 4"),
        (64, 4, -1, "cp_rank .* got -1 with cp_size 4"),
    ],
)
def test_impossible_groups_are_refused(
    page_size: int, cp_size: int, cp_rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CpSharedKVLayout(page_size, cp_size, cp_rank)


@both_libraries
@pytest.mark.parametrize(
    ("pages", "positions"), [([1, 2], [0]), ([[1, 2]], [[0, 1]]), ([1, 2], [[0, 1]])]
)
def test_pages_and_positions_of_different_shapes_are_refused(
    make: Make, pages: Any, positions: Any
) -> None:
    with pytest.raises(ValueError, match="equally long, got shapes"):
        CpSharedKVLayout(64, 2).filter_owned_pages(make(pages), make(positions))
