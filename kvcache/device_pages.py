"""The device tier's pages: whose each is, and which are evicted when some are needed.

A page is free, a request's own or the tree's. Knows no tokens: in which order the tree may give
pages up is the tree's to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcache.allocator import CPSharedPagedAllocator, count_lanes, count_tail, lane_of_page
from kvcache.host_pages import HostPages
from kvcache.pins import Pins
from kvcache.radix_tree import Node, RadixTree


class DevicePages:
    """Accounts count pages. `counts`, cumulative: `evicted_device_pages`, and of them
    `dropped_device_pages`, those that no host tier had."""

    def __init__(
        self,
        allocator: CPSharedPagedAllocator,
        tree: RadixTree,
        pins: Pins,
        counts: Counter[str],
        host: HostPages | None = None,
    ) -> None:
        self._allocator = allocator
        self._tree = tree
        self._pins = pins
        self._counts = counts
        self._host = host
        self._is_trees = bytearray(allocator.total_pages + 1)  # by page: 1 where it is the tree's
        self._last_eviction = (0, 0)  # pages asked for, pages evicted

    # -- accounts

    @property
    def total_pages(self) -> int:
        return self._allocator.total_pages

    @property
    def free_pages(self) -> int:
        return self._allocator.available_pages

    @property
    def evictable_pages(self) -> int:
        return sum(self._tree.evictable)

    @property
    def locked_pages(self) -> int:
        return self._tree.num_pages - self.evictable_pages

    @property
    def held_pages(self) -> int:
        """Pages that belong to requests alone."""
        return self._allocator.held_pages - self._tree.num_pages

    @property
    def obtainable_pages(self) -> int:
        """What `alloc` is sure to get now, free or evictable: the smallest lane times the lanes."""
        return min(self._obtainable_by_lane()) * self._allocator.num_lanes

    def used_by_lane(self) -> list[int]:
        """Pages that are not free, by lane: how evenly the ranks are filled."""
        free = self._allocator.available_by_lane()
        return [self._allocator.pages_per_lane - pages for pages in free]

    def state_str(self) -> str:
        """For messages about missing pages; sizes in tokens."""
        asked, evicted = self._last_eviction
        page_size = self._allocator.page_size
        return (
            f"{self._allocator.allocator_state_str()} "
            f"evictable_size={self.evictable_pages * page_size} "
            f"obtainable_size={self.obtainable_pages * page_size} "
            f"last_eviction=[asked_pages={asked}, evicted_pages={evicted}]"
        )

    # -- taken and given back

    def alloc(self, num_pages: int, after_page: int | None = None) -> list[int] | None:
        """`num_pages` pages for one request, whose last page so far is `after_page` (None: it has
        none). Evicts what is needed for it; None, and nothing has changed, where that would not
        be enough. Pages are dealt in turn to the lanes, unless only an uneven deal can be had."""
        start_lane = self._allocator.lane_after(after_page)
        pages = self._allocator.alloc(num_pages, start_lane)
        if pages is not None:
            return pages
        obtainable = self._obtainable_by_lane()
        if after_page is None:
            start_lane = obtainable.index(max(obtainable))  # the fullest, once evicted
        needs = self._allocator.needs_by_lane(num_pages, start_lane)
        if all(need <= most for need, most in zip(needs, obtainable, strict=True)):
            self._make_room(needs)
            return self._allocator.alloc(num_pages, start_lane)
        if num_pages > sum(obtainable):
            return None
        lanes = []
        for _ in range(num_pages):
            lane = obtainable.index(max(obtainable))
            obtainable[lane] -= 1
            lanes.append(lane)
        self._make_room([lanes.count(lane) for lane in range(len(obtainable))])
        return self._allocator.alloc_lanes(lanes)

    def alloc_beside(self, host_pages: Sequence[int]) -> list[int] | None:
        """Pages in the lanes of `host_pages`, evicting what is needed; None, and nothing has
        changed, where that would not be enough."""
        num_lanes = self._allocator.num_lanes
        needs = count_lanes(host_pages, num_lanes)
        if any(need > m for need, m in zip(needs, self._obtainable_by_lane(), strict=True)):
            return None
        self._make_room(needs)
        return self._allocator.alloc_lanes([lane_of_page(page, num_lanes) for page in host_pages])

    def free(self, pages: Sequence[int]) -> None:
        """Give back pages that a request owns. ValueError, and nothing has changed, where one is
        the tree's, free or named twice."""
        self.check_own(pages)
        self._allocator.free(pages)

    def give_to_tree(self, pages: Sequence[int]) -> None:
        """A request's own pages are the tree's from now on."""
        for page in pages:
            self._is_trees[page] = 1

    # -- evicted

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, least recently used first; how many it was."""
        self._pins.expire()
        num_evicted = 0
        while num_evicted < num_pages and (leaf := self._tree.oldest_leaf()) is not None:
            num_evicted += self.drop(leaf, min(num_pages - num_evicted, len(leaf.pages)))
        self._last_eviction = (num_pages, num_evicted)
        return num_evicted

    def drop(self, leaf: Node, num_pages: int) -> int:
        """Free the last `num_pages` pages of a leaf that is not kept."""
        self._counts["evicted_device_pages"] += num_pages
        if not leaf.host_pages:
            self._counts["dropped_device_pages"] += num_pages
        pages = self._tree.trim(leaf, num_pages)
        for page in pages:
            self._is_trees[page] = 0
        self._allocator.free(pages)
        if self._host is not None:
            self._host.free_dropped()
        return num_pages

    def _obtainable_by_lane(self) -> list[int]:
        self._pins.expire()
        available = self._allocator.available_by_lane()
        return [a + b for a, b in zip(available, self._tree.evictable, strict=True)]

    def _make_room(self, needs: Sequence[int]) -> None:
        """Evict until needs[lane] pages of each lane are free; the caller knows that it can be. Of
        a leaf, no more goes than its tail down to the last page that is wanted."""
        available = self._allocator.available_by_lane()
        missing = [max(0, need - have) for need, have in zip(needs, available, strict=True)]
        num_asked, num_evicted = sum(missing), 0
        while any(missing):
            leaf = self._tree.oldest_leaf()
            if leaf is None:
                raise AssertionError(f"evictable pages miscounted: {self.state_str()}")
            num_pages, missing = count_tail(leaf.pages, missing)
            num_evicted += self.drop(leaf, num_pages)
        self._last_eviction = (num_asked, num_evicted)

    # -- checked

    def check_own(self, pages: Sequence[int]) -> None:
        """ValueError unless the pages are a request's own, each named once."""
        for page in pages:
            if not self._allocator.is_held(page) or self._is_trees[page]:
                owner = "the prefix cache's" if self._allocator.is_held(page) else "not allocated"
                raise ValueError(f"page {page} is {owner}; only a request's own page can be given")
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is named twice in {list(pages)}")

    def check(self) -> None:
        """AssertionError unless tree, allocator and flags agree. O(pages); for tests."""
        self._allocator.check()
        pages = [page for node in self._tree.nodes() for page in node.pages]
        flagged = [page for page, is_trees in enumerate(self._is_trees) if is_trees]
        if sorted(pages) != flagged:
            raise AssertionError(f"the tree holds pages {sorted(pages)}, flagged are {flagged}")
        if not all(map(self._allocator.is_held, pages)):
            raise AssertionError("the tree holds a page that is free")
