"""The prefix cache as a scheduler uses it: who owns which page, eviction by lane, refusals."""

from __future__ import annotations

import pytest

from kvcache.allocator import CPSharedPagedAllocator, count_lanes
from kvcache.prefix_cache import PrefixCache


def make_cache(pages_per_lane: int, page_size: int = 2, cp_size: int = 1) -> PrefixCache:
    return PrefixCache(CPSharedPagedAllocator(pages_per_lane, page_size, cp_size))


def cache_prompt(cache: PrefixCache, token_ids: list[int]) -> list[int]:
    """Compute and insert a prompt of whole pages, as a request that ends at once."""
    match = cache.match(token_ids)
    num_new = len(token_ids) // cache.page_size - len(match.pages)
    pages = cache.device.alloc(num_new, match.pages[-1] if match.pages else None)
    assert pages is not None
    inserted = cache.insert(token_ids, match.pages + pages)
    assert inserted.duplicates == []
    return inserted.pages


def accounts(cache: PrefixCache) -> tuple[int, int, int, int]:
    cache.check()
    parts = (
        cache.device.free_pages,
        cache.device.held_pages,
        cache.device.evictable_pages,
        cache.device.locked_pages,
    )
    assert sum(parts) == cache.device.total_pages
    return parts


def test_a_request_from_first_token_to_last() -> None:
    cache = make_cache(8)
    match = cache.match([1, 2, 3, 4])
    assert (match.pages, match.num_tokens) == ([], 0)
    cache.lock(match.node)
    pages = cache.device.alloc(3)
    assert pages == [1, 2, 3]
    assert accounts(cache) == (5, 3, 0, 0)

    inserted = cache.insert([1, 2, 3, 4, 5], pages)  # the third page is not full
    assert (inserted.num_existing_tokens, inserted.pages) == (0, [1, 2])
    cache.lock(inserted.node)
    cache.unlock(match.node)
    assert accounts(cache) == (5, 1, 0, 2)

    cache.device.free(pages[2:])
    cache.unlock(inserted.node)
    assert accounts(cache) == (6, 0, 2, 0)
    again = cache.match([1, 2, 3, 4, 5])
    assert (again.pages, again.num_tokens, again.node) == ([1, 2], 4, inserted.node)


def test_the_trees_pages_win_and_the_caller_frees_its_duplicates() -> None:
    cache = make_cache(8)
    first, second = cache.device.alloc(2), cache.device.alloc(3)
    assert first == [1, 2] and second == [3, 4, 5]
    cache.insert([1, 2, 3, 4], first)
    inserted = cache.insert([1, 2, 3, 4, 5, 6], second)
    assert (inserted.num_existing_tokens, inserted.pages) == (4, [1, 2, 5])
    assert inserted.duplicates == [3, 4]
    assert accounts(cache) == (3, 2, 3, 0)
    cache.device.free(inserted.duplicates)
    assert accounts(cache) == (5, 0, 3, 0)
    assert cache.match([1, 2, 3, 4, 5, 6]).pages == [1, 2, 5]


def test_inserting_what_is_there_changes_nothing() -> None:
    cache = make_cache(8)
    pages = cache_prompt(cache, [1, 2, 3, 4])
    before = accounts(cache)
    inserted = cache.insert([1, 2, 3, 4], pages)
    assert (inserted.num_existing_tokens, inserted.pages) == (4, pages)
    assert inserted.duplicates == []
    assert accounts(cache) == before


def test_less_than_a_page_is_not_cached() -> None:
    cache = make_cache(8, page_size=4)
    pages = cache.device.alloc(1)
    assert pages == [1]
    assert cache.insert([1, 2, 3], pages).pages == []
    assert accounts(cache) == (7, 1, 0, 0)


def test_insert_after_a_locked_node_equals_insert_from_the_start() -> None:
    cache = make_cache(8)
    pages = cache.device.alloc(4)
    assert pages is not None
    first = cache.insert([1, 2, 3, 4], pages[:2])
    cache.lock(first.node)
    more = cache.insert([5, 6, 7, 8, 9], pages[2:], after=first.node)
    assert (more.num_existing_tokens, more.pages) == (0, [3, 4])
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8]).pages == [1, 2, 3, 4]
    cache.unlock(first.node)
    with pytest.raises(RuntimeError, match="not locked"):
        cache.insert([7, 7], [], after=first.node)
    assert accounts(cache) == (4, 0, 4, 0)


def test_alloc_evicts_the_oldest_prefix_and_only_as_much_as_it_needs() -> None:
    cache = make_cache(8)
    cache_prompt(cache, [1, 2, 3, 4, 5, 6])
    cache_prompt(cache, [7, 8, 9, 10])
    assert cache.device.free_pages == 3
    assert cache.device.alloc(4) is not None
    assert cache.match([1, 2, 3, 4, 5, 6]).num_tokens == 4
    assert cache.match([7, 8, 9, 10]).num_tokens == 4
    assert cache.device.state_str() == (
        "allocator_available_size=0 (allocator_free_size=0 [free_pages=0] + "
        "allocator_release_size=0 [release_pages=0]) evictable_size=8 obtainable_size=8 "
        "last_eviction=[asked_pages=1, evicted_pages=1]"
    )


def test_alloc_that_cannot_be_met_evicts_nothing() -> None:
    cache = make_cache(6)
    cache_prompt(cache, [1, 2, 3, 4])
    cache.lock(cache.match([1, 2, 3, 4]).node)
    cache_prompt(cache, [5, 6, 7, 8])
    before = accounts(cache)
    assert cache.device.obtainable_pages == 4
    assert cache.device.alloc(5) is None
    assert accounts(cache) == before
    assert cache.match([5, 6, 7, 8]).num_tokens == 4
    assert cache.device.alloc(4) is not None
    assert accounts(cache) == (0, 4, 0, 2)


def test_alloc_goes_on_in_the_lane_after_the_prefix() -> None:
    cache = make_cache(4, cp_size=4)
    pages = cache_prompt(cache, [1, 2, 3, 4, 5, 6])
    assert pages == [1, 2, 3]
    assert cache.device.alloc(3, after_page=3) == [4, 5, 6]


def test_eviction_goes_on_until_the_lane_that_is_short_has_enough() -> None:
    cache = make_cache(2, page_size=1, cp_size=2)
    assert cache_prompt(cache, [1]) == [1]  # lane 0
    assert cache_prompt(cache, [2]) == [2]  # lane 1
    held = cache.device.alloc(1)
    assert held == [3]
    # Lane 1 has page 4 free and page 2 cached; lane 0 only page 1, cached and the oldest.
    assert cache.device.alloc(2, after_page=3) == [4, 1]
    # Page 2 is all that is left. Lane 0 would be next, but an uneven deal is better than none.
    assert cache.device.obtainable_pages == 0
    assert cache.device.alloc(1, after_page=4) == [2]
    assert cache.device.alloc(1, after_page=2) is None
    assert accounts(cache) == (0, 4, 0, 0)


def test_evict_frees_up_to_the_number_asked_for() -> None:
    cache = make_cache(8)
    cache_prompt(cache, [1, 2, 3, 4, 5, 6])
    cache_prompt(cache, [7, 8])
    assert cache.device.evict(0) == 0
    assert cache.device.evict(2) == 2
    assert cache.match([1, 2, 3, 4, 5, 6]).num_tokens == 2
    assert cache.device.evict(9) == 2
    assert accounts(cache) == (8, 0, 0, 0)


def test_reset_forgets_every_prefix_but_not_under_a_lock() -> None:
    cache = make_cache(8)
    cache_prompt(cache, [1, 2, 3, 4])
    own = cache.device.alloc(1)
    node = cache.match([1, 2]).node
    cache.lock(node)
    with pytest.raises(RuntimeError, match="1 pages are locked"):
        cache.reset()
    assert cache.match([1, 2, 3, 4]).num_tokens == 4
    cache.unlock(node)
    cache.reset()
    assert cache.match([1, 2, 3, 4]).num_tokens == 0
    assert own is not None
    assert accounts(cache) == (7, 1, 0, 0)


def test_pages_that_are_not_the_requests_are_refused() -> None:
    cache = make_cache(8)
    cached = cache_prompt(cache, [1, 2, 3, 4])
    own = cache.device.alloc(2)
    assert own == [3, 4]
    before = accounts(cache)
    with pytest.raises(ValueError, match="page 1 is the prefix cache's"):
        cache.device.free([own[0], cached[0]])
    with pytest.raises(ValueError, match="page 8 is not allocated"):
        cache.device.free([8])
    with pytest.raises(ValueError, match="twice"):
        cache.device.free([3, 3])
    with pytest.raises(ValueError, match="page 2 is the prefix cache's"):
        cache.insert([9, 9, 8, 8], [3, 2])  # cached, but for another prefix
    with pytest.raises(ValueError, match="page 0 is not allocated"):
        cache.insert([9, 9], [0])
    with pytest.raises(ValueError, match="twice"):
        cache.insert([9, 9, 8, 8], [3, 3])
    with pytest.raises(ValueError, match="4 tokens fill 2 pages of 2, got 1 pages"):
        cache.insert([9, 9, 8, 8], [3])
    assert accounts(cache) == before


def test_a_match_counts_as_a_hit_on_its_whole_path() -> None:
    cache = make_cache(8)
    cache_prompt(cache, [1, 2, 3, 4])
    cache_prompt(cache, [1, 2, 5, 6])
    hits = cache.match([1, 2]).node.hits
    node = cache.match([1, 2, 5, 6]).node
    assert node.hits == 1
    assert node.parent is not None and node.parent.hits == hits + 1


def test_a_prompt_larger_than_a_rank_fits_the_group() -> None:
    cache = make_cache(3, page_size=1, cp_size=4)
    token_ids = list(range(12))
    pages = cache_prompt(cache, token_ids)
    assert count_lanes(pages, 4) == [3, 3, 3, 3]
    assert cache.match(token_ids).num_tokens == 12


def test_without_a_host_tier_there_is_nothing_to_load_back_or_to_copy() -> None:
    cache = make_cache(8)
    cache_prompt(cache, [1, 2, 3, 4])
    match = cache.match([1, 2, 3, 4, 5, 6])
    assert (match.num_tokens, match.num_host_tokens, match.host_node) == (4, 0, None)
    assert cache.load_back(match, mem_quota=99, threshold=1) == "threshold"
    cache.use(match)
    assert match.node.hits == 1
    assert not cache.take_orders()
    assert cache.num_under_way == 0
    assert cache.mem_quota(3) == 16 - (3 + 2)
    assert accounts(cache) == (6, 0, 2, 0)


class Clock:
    """Seconds, as a test says."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def pinned_cache(clock: Clock, num_pages: int = 8) -> PrefixCache:
    return PrefixCache(CPSharedPagedAllocator(num_pages, 2), clock=clock)


def test_eviction_skips_a_pinned_prefix_until_its_time_is_over() -> None:
    clock = Clock()
    cache = pinned_cache(clock)
    cache_prompt(cache, [1, 1, 2, 2])
    cache_prompt(cache, [3, 3, 4, 4])
    assert cache.pin(cache.match([1, 1, 2, 2]).node, 10)
    assert accounts(cache) == (4, 0, 2, 2)
    assert cache.device.evict(8) == 2
    assert cache.match([1, 1, 2, 2]).num_tokens == 4
    clock.now = 9
    assert cache.device.obtainable_pages == 6
    clock.now = 10
    assert accounts(cache) == (6, 0, 0, 2)  # nobody has looked yet
    assert cache.device.obtainable_pages == 8
    assert cache.device.evict(8) == 2
    assert cache.match([1, 1, 2, 2]).num_tokens == 0
    assert (cache.counts["pins_made"], cache.counts["pins_expired"]) == (1, 1)


def test_an_allocation_meets_an_expired_pin() -> None:
    clock = Clock()
    cache = pinned_cache(clock)
    cache_prompt(cache, [1, 1, 2, 2])
    assert cache.pin(cache.match([1, 1, 2, 2]).node, 5)
    assert cache.device.alloc(7) is None
    clock.now = 5
    assert cache.device.alloc(7) is not None
    cache.check()


def test_the_longest_time_asked_for_wins_and_is_one_pin() -> None:
    clock = Clock()
    cache = pinned_cache(clock)
    cache_prompt(cache, [1, 1, 2, 2])
    node = cache.match([1, 1, 2, 2]).node
    for num_s in (5, 20, 10):
        assert cache.pin(node, num_s)
    assert cache.counts["pins_made"] == 1
    clock.now = 19
    assert cache.device.evict(8) == 0
    clock.now = 20
    assert cache.device.evict(8) == 2


def test_pins_of_prefixes_in_common_end_one_by_one_also_after_a_split() -> None:
    clock = Clock()
    cache = pinned_cache(clock)
    cache_prompt(cache, [1, 1, 2, 2, 3, 3])
    assert cache.pin(cache.match([1, 1, 2, 2, 3, 3]).node, 5)
    assert cache.pin(cache.match([1, 1, 2, 2]).node, 10)  # splits the pinned node
    assert cache.pinned_pages == 3
    clock.now = 5
    assert cache.device.evict(8) == 1
    assert cache.match([1, 1, 2, 2, 3, 3]).num_tokens == 4
    assert cache.pinned_pages == 2
    clock.now = 10
    assert cache.device.evict(8) == 2
    assert cache.pinned_pages == 0
    assert accounts(cache) == (8, 0, 0, 0)


def test_pins_keep_no_more_than_half_of_the_pages_and_can_be_dropped() -> None:
    cache = pinned_cache(Clock())
    for first in (1, 2, 3):
        cache_prompt(cache, [first] * 4)
    assert cache.pin(cache.match([1] * 4).node, 5)
    assert cache.pin(cache.match([2] * 4).node, 5)
    assert not cache.pin(cache.match([3] * 4).node, 5)
    assert cache.counts["pins_refused"] == 1
    assert cache.device.evict(8) == 2
    assert cache.drop_pins()
    assert not cache.drop_pins()
    assert cache.counts["pins_dropped"] == 2
    assert cache.device.evict(8) == 4


def test_the_empty_prefix_needs_no_pin() -> None:
    cache = pinned_cache(Clock())
    assert cache.pin(cache.match([]).node, 5)
    assert not cache.drop_pins()
