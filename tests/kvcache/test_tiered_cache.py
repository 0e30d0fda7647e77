"""The cache over two tiers, call by call: policies, load-backs and why not, locks, evictions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcache.allocator import CPSharedPagedAllocator, lane_of_page
from kvcache.host_plan import HostOrders
from kvcache.prefix_cache import Inserted, LoadedBack
from kvcache.tiered_cache import TieredCache, WritePolicy
from kvcache.tiered_tree import TieredTree
from tests.kvcache.host_group import Group

A = list(range(100, 110))  # five pages of two tokens
B = list(range(200, 210))


def run(group: Group, token_ids: Sequence[int], *, wants_host: bool = False) -> Inserted:
    """One request of whole pages from its match to its end."""
    cache = group.cache
    match = cache.match(token_ids)
    if wants_host:
        found = cache.load_back(match, mem_quota=cache.mem_quota(0), threshold=1)
        assert isinstance(found, LoadedBack)
        match = found.match
    cache.lock(match.node)
    num_new = len(token_ids) // cache.page_size - len(match.pages)
    new = cache.device.alloc(num_new, match.pages[-1] if match.pages else None)
    assert new is not None, cache.device.state_str()
    cache.use(match)
    group.start()
    group.forward(token_ids, match.pages)
    pages = match.pages + new
    group.write(token_ids, pages, len(match.pages))
    inserted = cache.insert(token_ids, pages)
    cache.device.free(inserted.duplicates)
    cache.unlock(match.node)
    group.check()
    return inserted


def hits(group: Group, token_ids: Sequence[int]) -> tuple[int, int]:
    """(tokens on the device, tokens beyond on the host)"""
    match = group.cache.match(token_ids)
    group.check()
    return match.num_tokens, match.num_host_tokens


def numbers(orders: HostOrders) -> tuple[int, int]:
    return len(orders.load_backs), len(orders.backups)


def test_write_through_backs_up_what_is_inserted_once() -> None:
    group = Group()
    run(group, A)
    (backup,) = group.start().backups
    assert len(backup.device_pages) == len(backup.host_pages) == 5
    assert group.start() == HostOrders()
    group.settle()
    run(group, A)
    run(group, A)
    assert not group.start()
    assert group.cache.match(A).node.hits == 2


def test_selective_backs_up_at_the_second_hit() -> None:
    group = Group(policy="write_through_selective")
    started = []
    for _ in range(4):  # the first inserts
        run(group, A)
        started.append(group.cache.counts["backups_started"])
    assert started == [0, 0, 1, 1]


def test_selective_counts_requests_that_start_and_not_those_that_ask() -> None:
    group = Group(policy="write_through_selective")
    run(group, A)
    for _ in range(5):
        group.cache.match(A)
    assert not group.start()


def test_write_back_backs_up_before_the_pages_are_short_and_evicts_after() -> None:
    group = Group(pages=8, host_pages=8, policy="write_back")
    run(group, A)
    assert not group.start()
    assert group.cache.reclaim(3)  # those are free
    assert not group.cache.reclaim(6)
    orders = group.start()
    assert numbers(orders) == (0, 1)
    assert hits(group, A) == (10, 0)
    assert group.cache.device.evict(8) == 0  # the backup reads them
    group.settle()
    assert not group.start()  # nothing is short
    assert group.cache.reclaim(6)
    assert hits(group, A) == (4, 6)
    assert group.cache.counts["dropped_device_pages"] == 0


def test_write_back_keeps_a_share_free_by_itself() -> None:
    group = Group(pages=16, host_pages=16, policy="write_back")
    for first in (100, 200, 300):
        run(group, list(range(first, first + 10)))
    assert group.cache.device.free_pages == 1
    assert group.cache.counts["backups_started"] == 1
    group.settle()
    assert not group.start()
    assert group.cache.device.free_pages == 2
    assert hits(group, list(range(100, 110))) == (8, 2)


def test_what_leaves_the_device_comes_back_from_the_host() -> None:
    group = Group(pages=6, host_pages=12)
    run(group, A)
    group.settle()
    run(group, B)
    group.settle()
    assert hits(group, A) == (2, 8)
    assert run(group, A, wants_host=True).num_existing_tokens == 10
    assert group.cache.counts["load_backs_started"] == 1
    group.settle()
    assert hits(group, A) == (10, 0)
    group.check()


def test_write_evict_load_split_load_with_frees_between() -> None:
    """At four ranks, with the lanes turned between so that row pages differ each time."""
    group = Group(size=4, pages=5, host_pages=6)
    cache = group.cache
    long = list(range(16))  # eight pages
    run(group, long)
    group.settle()
    for first in (100, 200, 300):
        own = cache.device.alloc(3)
        assert own is not None
        cache.device.evict(20)
        cache.device.free(own)
        assert hits(group, long) == (0, 16)
        run(group, list(range(first, first + 6)))
        run(group, long[:6] + [99] * 4, wants_host=True)  # splits on the host, loads the upper part
        group.settle()
        assert hits(group, long)[0] == 6
        run(group, long, wants_host=True)
        group.settle()
        assert hits(group, long) == (16, 0)


def test_a_prefix_shorter_than_the_threshold_is_computed() -> None:
    group = Group(pages=6, host_pages=12)
    run(group, A)
    group.settle()
    group.cache.device.evict(4)
    match = group.cache.match(A)
    assert match.num_host_tokens == 8
    assert group.cache.load_back(match, mem_quota=99) == "threshold"  # 10 by default
    assert group.cache.load_back(match, mem_quota=99, threshold=9) == "threshold"
    assert isinstance(group.cache.load_back(match, mem_quota=99, threshold=8), LoadedBack)
    assert group.cache.counts["load_backs_skipped_threshold"] == 2
    assert group.cache.load_back(group.cache.match([7] * 9), mem_quota=99) == "threshold"


def test_a_load_back_that_would_starve_others_is_not_made() -> None:
    group = Group(pages=8, host_pages=8)
    run(group, A)
    group.settle()
    group.cache.device.evict(3)
    cache, match = group.cache, group.cache.match(A)
    assert (match.num_tokens, match.num_host_tokens) == (4, 6)
    assert cache.mem_quota(4) == 8 * 2 - (4 + 2)
    assert cache.mem_quota(99) == 0
    # What this match keeps from eviction is no room for it: 4 tokens.
    assert cache.load_back(match, mem_quota=9, threshold=1) == "quota"
    assert cache.device.locked_pages == 0
    assert isinstance(cache.load_back(match, mem_quota=10, threshold=1), LoadedBack)
    assert cache.counts["load_backs_skipped_quota"] == 1


def test_a_load_back_without_device_pages_is_not_made() -> None:
    group = Group(pages=6, host_pages=12)
    run(group, A)
    group.settle()
    group.cache.device.evict(5)
    own = group.cache.device.alloc(3)
    assert own is not None
    match = group.cache.match(A)
    assert group.cache.load_back(match, mem_quota=99) == "no_device_pages"
    assert group.cache.counts["load_backs_skipped_no_device_pages"] == 1
    assert (group.cache.device.locked_pages, group.cache.device.free_pages) == (0, 3)
    group.cache.device.free(own)
    assert isinstance(group.cache.load_back(match, mem_quota=99), LoadedBack)


def test_a_load_back_evicts_in_the_lanes_it_needs() -> None:
    """Two lanes of three pages. Host pages lie in lane 1 only; lane 0 is free, lane 1 is cached."""
    group = Group(size=2, pages=3, host_pages=4)
    cache = group.cache
    own = cache.device.alloc(6)
    assert own is not None
    lane_1 = [page for page in own if lane_of_page(page, 2) == 1]
    cache.device.free([page for page in own if page not in lane_1])
    for first, pages in ((1, lane_1[:2]), (51, lane_1[2:])):
        token_ids = list(range(first, first + 2 * len(pages)))
        group.write(token_ids, pages)
        cache.insert(token_ids, pages)
        group.settle()
    cache.device.evict(2)
    assert hits(group, [1, 2, 3, 4]) == (0, 4)
    run(group, [51, 52, 53, 54])  # the second page goes to lane 0
    group.settle()
    found = cache.load_back(cache.match([1, 2, 3, 4]), mem_quota=99, threshold=1)
    assert isinstance(found, LoadedBack)
    assert [lane_of_page(page, 2) for page in found.item.device_pages] == [1, 1]
    group.settle()
    group.check()


def test_a_full_host_keeps_what_it_has_of_the_device_and_counts() -> None:
    group = Group(pages=12, host_pages=5)
    run(group, A)
    group.settle()
    run(group, B)
    assert not group.start().backups  # all host pages are copies of what the device has
    assert group.cache.counts["backups_skipped_no_host_pages"] == 1
    group.cache.device.evict(5)
    assert hits(group, A) == (0, 10)
    run(group, B)  # a hit gives B another chance: A is host-only by now
    assert group.cache.counts["backups_started"] == 2
    assert group.cache.counts["evicted_host_pages"] == 5
    assert hits(group, A) == (0, 0)


def test_host_eviction_stops_at_the_slots_that_the_lane_needs() -> None:
    """Two lanes of four host pages, all host-only; a backup of one page needs one of them."""
    group = Group(size=2, pages=8, host_pages=4)
    run(group, list(range(16)))
    group.settle()
    group.cache.device.evict(16)
    assert group.cache.free_host_pages == 0
    inserted = run(group, [99, 99])
    assert numbers(group.start()) == (0, 1)
    evicted = group.cache.counts["evicted_host_pages"]
    # From the end of the leaf to the first page in that lane: one or two.
    last_lane = lane_of_page(inserted.pages[0], 2)
    assert evicted == (1 if last_lane == 1 else 2)
    group.settle()
    assert hits(group, list(range(16)))[1] == 16 - 2 * evicted


def test_a_backup_keeps_its_pages_until_the_last_rank() -> None:
    group = Group(size=2, pages=3, host_pages=6)
    cache = group.cache
    run(group, A)
    (item,) = group.start().backups
    for rank in group.ranks:
        rank.copier.close()
    assert cache.device.evict(9) == 0
    assert not cache.acknowledge(item.id, 1)
    assert cache.device.evict(9) == 0
    assert cache.device.alloc(2) is None
    assert cache.acknowledge(item.id, 0)
    assert cache.device.evict(9) == 5
    assert cache.num_under_way == 0


def test_a_load_back_keeps_both_sides_until_the_last_rank() -> None:
    group = Group(size=2, pages=6, host_pages=5)
    cache = group.cache
    run(group, A)
    group.settle()
    cache.device.evict(9)
    match = cache.match(A)
    found = cache.load_back(match, mem_quota=99)
    assert isinstance(found, LoadedBack)
    (item,) = group.start().load_backs
    assert not cache.acknowledge(item.id, 0)
    assert cache.device.evict(9) == 0
    run(group, list(range(12)))  # wants three host pages a lane: there are two and three
    assert not group.start().backups
    assert cache.counts["backups_skipped_no_host_pages"] == 1
    group.ranks[1].copier.close()
    group.ranks[0].copier.close()
    assert cache.acknowledge(item.id, 1)
    assert cache.device.evict(99) == 11


def test_acknowledgements_that_make_no_sense_are_refused() -> None:
    group = Group(size=2, pages=6, host_pages=5)
    run(group, A)
    (item,) = group.start().backups
    with pytest.raises(ValueError, match=rf"item 7 is not under way; those are \[{item.id}\]"):
        group.cache.acknowledge(7, 0)
    group.cache.acknowledge(item.id, 0)
    for rank in (0, 2, -1):
        with pytest.raises(ValueError, match=rf"waits for the ranks \[1\], got rank {rank}"):
            group.cache.acknowledge(item.id, rank)
    group.cache.acknowledge(item.id, 1)
    with pytest.raises(ValueError, match="is not under way"):
        group.cache.acknowledge(item.id, 1)


def test_ranks_that_all_hold_everything_each_acknowledge() -> None:
    cache = TieredCache(CPSharedPagedAllocator(8, 2), CPSharedPagedAllocator(8, 2), num_ranks=3)
    pages = cache.device.alloc(2)
    assert pages is not None
    cache.insert([1, 2, 3, 4], pages)
    (item,) = cache.take_orders().backups
    assert [cache.acknowledge(item.id, rank) for rank in (2, 0, 1)] == [False, False, True]


def test_spans_split_while_they_are_copied() -> None:
    group = Group(pages=10, host_pages=10)
    cache = group.cache
    run(group, A)
    group.start()
    run(group, [*A[:4], 7, 7])  # splits A while its backup is under way
    assert cache.num_under_way == 1
    group.settle()
    assert cache.device.locked_pages == 0
    cache.device.evict(99)
    assert hits(group, A) == (0, 10)
    found = cache.load_back(cache.match(A), mem_quota=99)
    assert isinstance(found, LoadedBack)
    group.start()
    run(group, A[:6])  # and again while it is loaded
    group.settle()
    assert cache.device.locked_pages == 0
    cache.device.evict(99)
    assert hits(group, A) == (0, 10)


def test_an_abort_during_a_load_back_leaves_the_copy_alone() -> None:
    group = Group(pages=6, host_pages=12)
    cache = group.cache
    run(group, A)
    group.settle()
    cache.device.evict(9)
    found = cache.load_back(cache.match(A), mem_quota=99)
    assert isinstance(found, LoadedBack)
    cache.lock(found.match.node)
    group.start()
    cache.unlock(found.match.node)  # the client is gone
    assert cache.device.evict(9) == 0
    group.settle()
    assert cache.device.evict(9) == 5
    group.check()


def test_a_request_that_computes_what_the_host_has_gives_its_pages() -> None:
    group = Group(pages=6, host_pages=12)
    run(group, A)
    group.settle()
    group.cache.device.evict(9)
    inserted = run(group, [*A, 1, 1])  # without a load-back
    assert (inserted.num_existing_tokens, len(inserted.pages)) == (0, 6)
    (backup,) = group.start().backups  # of what is new only
    assert backup.device_pages == inserted.pages[5:]
    group.settle()
    group.check()


def test_what_only_the_device_has_takes_along_what_hangs_below_it() -> None:
    """A backed up first, or B not at all; where B was, it goes with A."""
    group = Group(pages=12, host_pages=6)
    run(group, A)
    run(group, A + B)
    group.settle()
    assert group.cache.counts["backups_finished"] == 1
    assert group.cache.counts["backups_skipped_no_host_pages"] == 1
    group.cache.device.evict(99)
    assert hits(group, A + B) == (0, 10)

    group = Group(pages=12, host_pages=4, policy="write_back")
    run(group, A)
    run(group, A + B[:8])
    group.cache.reclaim(6)  # B first, as it is the leaf
    group.settle()
    group.cache.reclaim(12)  # B leaves the device; A finds no room on the host
    assert hits(group, A + B) == (10, 8)
    group.cache.device.evict(1)
    group.check()
    assert hits(group, A + B) == (8, 0)
    assert group.cache.free_host_pages == 4


def test_small_evictions_make_no_chain_of_small_nodes() -> None:
    group = Group(pages=10, host_pages=10)
    run(group, list(range(20)))
    group.settle()
    for num_left in range(9, 0, -1):
        group.cache.device.evict(1)
        group.check()
        assert hits(group, list(range(20)))[0] == 2 * num_left
        assert group.cache._tree.num_nodes == 2


def test_a_page_is_told_of_until_it_has_left_both_tiers() -> None:
    group = Group(pages=6, host_pages=6)
    events = group.cache._events
    assert events is not None
    run(group, A)
    group.settle()
    stored = events.take()
    assert stored is not None and len(stored.stored) == 5 * 16
    group.cache.device.evict(9)
    assert events.take() is None
    run(group, A, wants_host=True)
    group.settle()
    assert events.take() is None
    group.cache.device.evict(9)
    run(group, B[:4])  # needs one host page more than there is
    group.start()
    told = events.take()
    assert told is not None and (len(told.stored), len(told.removed)) == (2 * 16, 16)


def test_reset_forgets_both_tiers_and_not_while_a_copy_runs() -> None:
    group = Group(pages=6, host_pages=12)
    cache = group.cache
    run(group, A)
    group.settle()
    cache.device.evict(2)
    run(group, B[:2])
    group.start()
    with pytest.raises(RuntimeError, match="1 copies are under way"):
        cache.reset()
    assert hits(group, A) == (6, 4)
    group.settle()
    cache.reset()
    cache.check()
    assert (cache.device.free_pages, cache.free_host_pages) == (6, 12)
    assert hits(group, A) == (0, 0)


def test_what_was_evicted_or_loaded_since_the_match_is_noticed() -> None:
    group = Group(pages=6, host_pages=6)
    cache = group.cache
    run(group, A)
    group.settle()
    cache.device.evict(9)
    old = cache.match(A)
    assert isinstance(cache.load_back(cache.match(A), mem_quota=99), LoadedBack)
    with pytest.raises(RuntimeError, match="the match is old"):
        cache.load_back(old, mem_quota=99)
    group.settle()
    cache.device.evict(9)
    old = cache.match(A)
    run(group, B[:8])
    group.settle()
    with pytest.raises(RuntimeError, match="the match is old"):
        cache.load_back(old, mem_quota=99)


def pinned(group: Group, token_ids: Sequence[int], num_s: int) -> bool:
    inserted = run(group, token_ids)
    group.cache.lock(inserted.node)
    is_pinned = group.cache.pin(inserted.node, num_s)
    group.cache.unlock(inserted.node)
    return is_pinned


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_pinned_prefix_is_backed_up_and_outlives_others_in_the_host_tier(policy) -> None:
    group = Group(pages=10, host_pages=10, policy=policy)
    cache = group.cache
    assert pinned(group, A, 100)
    assert cache.device.evict(9) == 0  # it is nowhere else yet
    assert numbers(group.start()) == (0, 1)
    group.settle()
    for first in range(200, 300, 10):
        run(group, list(range(first, first + 10)))
        group.settle()
    assert hits(group, A) == (0, 10)
    assert cache.pinned_pages == 5
    group.now = 100
    for first in range(300, 400, 10):
        for _ in range(3):
            run(group, list(range(first, first + 10)))
            group.settle()
    assert cache.pinned_pages == 0
    assert hits(group, A) == (0, 0)
    assert cache.counts["pins_made"] == cache.counts["pins_expired"] == 1


def test_a_pinned_prefix_that_the_host_has_no_room_for_stays_on_the_device() -> None:
    group = Group(pages=20, host_pages=11)
    cache = group.cache
    for token_ids in (A, B):
        run(group, token_ids)
        group.settle()
    for token_ids in (A, B):  # keep what the host has
        cache.lock(cache.match(token_ids).node)
    assert pinned(group, [7, 7, 8, 8], 10)
    group.settle()
    assert cache.counts["backups_started"] == 2
    assert cache.counts["backups_skipped_no_host_pages"] == 1
    assert not pinned(group, list(range(300, 310)), 10)  # more than half of the pages
    assert cache.counts["pins_refused"] == 1
    assert cache.device.evict(20) == 5
    assert hits(group, [7, 7, 8, 8]) == (4, 0)


def test_the_part_of_a_pinned_node_that_leaves_the_device_stays_pinned() -> None:
    """Below it lies a host-only node that nobody has pinned, and that leaves."""
    group = Group(pages=12, host_pages=12)
    cache = group.cache
    long = [*A, 1, 1]
    run(group, long)
    group.settle()
    cache.device.evict(1)
    assert pinned(group, A, 10)
    cache.device.evict(2)
    assert hits(group, long) == (6, 6)
    for first in range(200, 300, 10):
        run(group, list(range(first, first + 10)))
        group.settle()
    assert sum(hits(group, long)) == 10
    cache.reset()
    assert cache.counts["pins_dropped"] == 1
    assert cache.pinned_pages == 0


def test_a_walk_that_misses_makes_no_node() -> None:
    group = Group(pages=6, host_pages=6)
    run(group, A)
    group.settle()
    group.cache.device.evict(2)
    tree = group.cache._tree
    num_nodes = tree.num_nodes
    for token_ids in ([1, 2, 3], [*A[:5], 7], A[1:], [*A, 5, 5]):
        group.cache.match(token_ids)
    assert tree.num_nodes == num_nodes + 1  # A[:5] ends inside a node: a split, no more
    with pytest.raises(KeyError):
        tree.root.children[b"none"]
    assert tree.num_nodes == num_nodes + 1


def test_tiers_must_have_the_same_lanes_and_the_policy_a_name() -> None:
    device = CPSharedPagedAllocator(4, 2, 2)
    with pytest.raises(ValueError, match=r"is \(2, 2\) on the device and \(2, 4\) on the host"):
        TieredCache(device, CPSharedPagedAllocator(4, 2, 4))
    never: WritePolicy = "never"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"--hicache-write-policy never: accepted are write_thr"):
        TieredCache(device, CPSharedPagedAllocator(4, 2, 2), policy=never)


def test_pages_go_only_where_they_belong_in_the_tree() -> None:
    tree = TieredTree(1)
    node = tree.append(tree.root, [b"a", b"b"], [1, 2])
    with pytest.raises(RuntimeError, match="only a host-only node"):
        tree.give_pages(node, [3, 4])
    with pytest.raises(ValueError, match="2 host pages are needed, got 1"):
        tree.set_host(node, [1])
    tree.set_host(node, [1, 2])
    with pytest.raises(RuntimeError, match="only a device-only node"):
        tree.set_host(node, [1, 2])
    with pytest.raises(RuntimeError, match="only an unlocked leaf"):
        tree.trim_host(node, 1)
    assert tree.trim(node, 2) == [1, 2]
    with pytest.raises(ValueError, match="2 pages are needed, got 1"):
        tree.give_pages(node, [3])
    assert tree.trim_host(node, 2) == [1, 2]
    tree.check()
    assert tree.num_nodes == 0
