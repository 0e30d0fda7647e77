"""A rank's record of a span in its host pool: validation, derivation, exact splits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.host_metadata import CpHiCacheNodeMetadata
from kvcache.sharding import CpSharedKVLayout


def record(logical_len: int, positions: list[int], host: list[int]) -> CpHiCacheNodeMetadata:
    return CpHiCacheNodeMetadata(
        logical_len,
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(host, dtype=torch.int64),
    )


def values(found: CpHiCacheNodeMetadata) -> tuple[int, list[int], list[int]]:
    return found.logical_len, found.owned_positions.tolist(), found.host_indices.tolist()


def test_a_split_in_the_middle() -> None:
    parent, child = record(10, [0, 2, 5, 9], [20, 21, 22, 23]).split(5)
    assert values(parent) == (5, [0, 2], [20, 21])
    assert values(child) == (5, [0, 4], [22, 23])


def test_splits_at_the_ends_move_everything() -> None:
    whole = record(10, [0, 2, 5, 9], [20, 21, 22, 23])
    assert list(map(values, whole.split(0))) == [(0, [], []), values(whole)]
    assert list(map(values, whole.split(10))) == [values(whole), (0, [], [])]


def test_a_rank_may_own_nothing() -> None:
    assert list(map(values, record(3, [], []).split(1))) == [(1, [], []), (2, [], [])]
    assert values(record(0, [], [])) == (0, [], [])


@pytest.mark.parametrize("num_pages", [-1, 11])
def test_a_split_outside_the_span_is_refused(num_pages: int) -> None:
    with pytest.raises(ValueError, match=rf"split must be in \[0, 10\], got {num_pages}"):
        record(10, [0, 2, 5, 9], [20, 21, 22, 23]).split(num_pages)


@pytest.mark.parametrize(
    ("logical_len", "positions", "host", "message"),
    [
        (-1, [], [], "logical_len must be at least 0, got -1"),
        (4, [0, 1], [7], "equally long, got 2 and 1"),
        (4, [1, 0], [7, 8], r"ascending, each once, got \[1, 0\]"),
        (4, [1, 1], [7, 8], r"ascending, each once, got \[1, 1\]"),
        (4, [-1, 1], [7, 8], r"must lie in \[0, 4\), got \[-1, 1\]"),
        (4, [1, 4], [7, 8], r"must lie in \[0, 4\), got \[1, 4\]"),
        (0, [0], [7], r"must lie in \[0, 0\), got \[0\]"),
    ],
)
def test_what_is_no_record_is_refused(
    logical_len: int, positions: list[int], host: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        record(logical_len, positions, host)


def test_lists_must_be_vectors_of_int64_on_the_cpu() -> None:
    good = torch.zeros(1, dtype=torch.int64)
    for bad in (good[None], good.int(), good.to("meta")):
        with pytest.raises(ValueError, match="owned_positions must be one-dimensional, int64"):
            CpHiCacheNodeMetadata(2, bad, good)
        with pytest.raises(ValueError, match="host_indices must be one-dimensional, int64"):
            CpHiCacheNodeMetadata(2, good, bad)


def test_derived_from_host_pages() -> None:
    """Pages 8, 3, 2, 7 of four ranks: owners 3, 2, 1, 2, row pages 2, 1, 1, 2."""
    found = [
        values(CpHiCacheNodeMetadata.of([8, 3, 2, 7], CpSharedKVLayout(64, 4, rank)))
        for rank in range(4)
    ]
    assert found == [(4, [], []), (4, [2], [1]), (4, [1, 3], [1, 2]), (4, [0], [2])]


@given(
    pages=st.lists(st.integers(1, 60), unique=True),
    cp_size=st.integers(1, 5),
    data=st.data(),
)
def test_a_split_record_is_the_record_of_the_split_span(
    pages: list[int], cp_size: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(pages)))
    owned = 0
    for rank in range(cp_size):
        layout = CpSharedKVLayout(4, cp_size, rank)
        whole = CpHiCacheNodeMetadata.of(pages, layout)
        parts = [CpHiCacheNodeMetadata.of(part, layout) for part in (pages[:cut], pages[cut:])]
        assert list(map(values, whole.split(cut))) == list(map(values, parts))
        owned += len(whole.owned_positions)
    assert owned == len(pages)
