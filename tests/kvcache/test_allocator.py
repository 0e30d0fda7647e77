"""The page allocator: dealing by lane, deferred frees, accounting, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.allocator import CPSharedPagedAllocator, count_lanes, count_tail, lane_of_page
from kvcache.sharding import CpSharedKVLayout


def lanes_of(pages: list[int], allocator: CPSharedPagedAllocator) -> list[int]:
    return [lane_of_page(page, allocator.num_lanes) for page in pages]


@pytest.mark.parametrize("cp_size", range(1, 17))
def test_a_page_lies_in_its_owners_lane(cp_size: int) -> None:
    pages = list(range(1, 100))
    owners = CpSharedKVLayout(64, cp_size).owner(np.array(pages)).tolist()
    assert [lane_of_page(page, cp_size) for page in pages] == owners
    assert count_lanes(pages, cp_size) == [owners.count(rank) for rank in range(cp_size)]


def test_pages_are_dealt_cyclically_from_the_start_lane() -> None:
    allocator = CPSharedPagedAllocator(4, 64, 4)
    assert allocator.alloc(6, 2) == [3, 4, 1, 2, 7, 8]
    assert allocator.alloc(0, 1) == []


def test_a_fresh_request_starts_at_the_fullest_lane() -> None:
    allocator = CPSharedPagedAllocator(4, 64, 4)
    assert allocator.alloc(2) == [1, 2]  # all equal: the first lane
    assert allocator.alloc(2) == [3, 4]
    assert allocator.alloc_lanes([0, 1, 3]) == [5, 6, 8]
    assert allocator.alloc(1) == [7]


def test_a_request_goes_on_in_the_lane_after_its_last_page() -> None:
    allocator = CPSharedPagedAllocator(4, 64, 4)
    assert [allocator.lane_after(page) for page in (1, 2, 3, 4, 5)] == [1, 2, 3, 0, 1]


def test_wanted_lanes_are_given_exactly() -> None:
    allocator = CPSharedPagedAllocator(3, 64, 2)
    assert allocator.alloc_lanes([1, 1, 0, 1]) == [2, 4, 1, 6]
    assert allocator.alloc_lanes([0, 1]) is None  # lane 1 is empty
    assert allocator.alloc_lanes([0, 0]) == [3, 5]
    assert allocator.alloc_lanes([]) == []


def test_what_cannot_be_met_changes_nothing() -> None:
    allocator = CPSharedPagedAllocator(2, 64, 2)
    allocator.alloc_lanes([0, 0])
    assert allocator.alloc(2) is None
    assert allocator.available_by_lane() == [0, 2]
    assert allocator.alloc(1, 1) == [2]


def test_freed_pages_wait_in_the_release_list_until_they_are_needed() -> None:
    allocator = CPSharedPagedAllocator(4, 64)
    assert allocator.alloc(3) == [1, 2, 3]
    allocator.free([1, 3])
    assert (allocator.free_pages, allocator.release_pages) == (1, 2)
    assert allocator.alloc(1) == [4]
    assert allocator.alloc(2) == [1, 3]  # merged in order
    assert allocator.available_pages == 0


def test_accounting_counts_pages_tokens_and_the_smallest_lane() -> None:
    allocator = CPSharedPagedAllocator(3, 64, 2)
    assert allocator.total_pages == 6
    pages = allocator.alloc_lanes([0, 0, 1, 0])
    assert pages is not None
    allocator.free(pages[:1])
    assert (allocator.free_size, allocator.release_size, allocator.available_size) == (128, 64, 192)
    assert allocator.allocator_state_str() == (
        "allocator_available_size=192 (allocator_free_size=128 [free_pages=2] + "
        "allocator_release_size=64 [release_pages=1])"
    )
    assert allocator.available_by_lane() == [1, 2]
    assert (allocator.smallest_lane_pages, allocator.obtainable_pages) == (1, 2)
    assert allocator.held_pages == 3


@pytest.mark.parametrize(
    ("pages", "named"), [([0], "page 0"), ([9], "page 9"), ([-1], "page -1"), ([3], "page 3")]
)
def test_freeing_a_page_that_is_not_held_is_refused(pages: list[int], named: str) -> None:
    allocator = CPSharedPagedAllocator(4, 64, 2)
    assert allocator.alloc(2) == [1, 2]
    with pytest.raises(ValueError, match=f"{named} is not held"):
        allocator.free([1, *pages])
    assert allocator.held_pages == 2


def test_freeing_twice_is_refused() -> None:
    allocator = CPSharedPagedAllocator(4, 64)
    assert allocator.alloc(2) == [1, 2]
    with pytest.raises(ValueError, match="twice"):
        allocator.free([1, 1])
    allocator.free([1])
    with pytest.raises(ValueError, match="page 1 is not held"):
        allocator.free([1])
    allocator.check()


def test_impossible_arguments_are_refused() -> None:
    for arguments in [(0, 64, 1), (4, 0, 1), (4, 64, 0)]:
        with pytest.raises(ValueError, match="must be positive, got 0"):
            CPSharedPagedAllocator(*arguments)
    allocator = CPSharedPagedAllocator(4, 64, 2)
    with pytest.raises(ValueError, match="got -1"):
        allocator.alloc(-1)
    for lane in (2, -1):
        with pytest.raises(ValueError, match=rf"lane must be in \[0, 2\), got {lane}"):
            allocator.alloc(1, lane)
        with pytest.raises(ValueError, match=rf"lane must be in \[0, 2\), got {lane}"):
            allocator.alloc_lanes([0, lane])
    assert allocator.available_pages == 8


@given(data=st.data(), cp_size=st.sampled_from([1, 2, 3, 4, 8]), per_lane=st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_random_traces_lose_no_page(data: st.DataObject, cp_size: int, per_lane: int) -> None:
    allocator = CPSharedPagedAllocator(per_lane, 16, cp_size)
    held: set[int] = set()
    for _ in range(data.draw(st.integers(1, 25), label="operations")):
        before = allocator.available_by_lane()
        kind = data.draw(st.sampled_from(["alloc", "alloc_lanes", "free"]), label="kind")
        if kind == "free":
            pages = data.draw(st.permutations(sorted(held)))[: data.draw(st.integers(0, 6))]
            allocator.free(pages)
            held.difference_update(pages)
        else:
            if kind == "alloc":
                num_pages = data.draw(st.integers(0, per_lane * cp_size + 1), label="num_pages")
                start = data.draw(st.integers(0, cp_size - 1), label="start")
                lanes = [(start + i) % cp_size for i in range(num_pages)]
                got = allocator.alloc(num_pages, start)
            else:
                lanes = data.draw(st.lists(st.integers(0, cp_size - 1), max_size=8), label="lanes")
                got = allocator.alloc_lanes(lanes)
            fits = all(lanes.count(lane) <= before[lane] for lane in range(cp_size))
            assert (got is not None) == fits
            if got is None:
                assert allocator.available_by_lane() == before
            else:
                assert lanes_of(got, allocator) == lanes
                assert held.isdisjoint(got)
                held.update(got)
        allocator.check()
        assert allocator.held_pages == len(held)
        held_by_lane = count_lanes(sorted(held), cp_size)
        totals = [a + b for a, b in zip(allocator.available_by_lane(), held_by_lane, strict=True)]
        assert totals == [per_lane] * cp_size


@given(
    cp_size=st.integers(1, 8),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12),
)
@settings(deadline=None)
def test_a_request_that_grows_is_spread_evenly(cp_size: int, steps: list[tuple[int, int]]) -> None:
    allocator = CPSharedPagedAllocator(64, 16, cp_size)
    requests: list[list[int]] = [[], [], [], []]
    for which, num_pages in steps:
        request = requests[which]
        last = request[-1] if request else None
        pages = allocator.alloc(num_pages, allocator.lane_after(last))
        if pages is not None:
            request += pages
        counts = count_lanes(request, cp_size)
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("missing", "num_pages", "left"),
    [
        ([0, 0], 0, [0, 0]),
        ([0, 1], 1, [0, 0]),
        ([1, 0], 2, [0, 0]),  # page 6, of the other lane, goes too
        ([3, 1], 6, [0, 0]),
        ([4, 1], 6, [1, 0]),
    ],
)
def test_a_tail_goes_down_to_the_last_page_that_is_wanted(
    missing: list[int], num_pages: int, left: list[int]
) -> None:
    assert count_tail([1, 2, 3, 4, 5, 6], missing) == (num_pages, left)
