"""The host tier's pages, logical: taken beside device pages, evicted when some are needed. All that
are not free are the tree's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcache.allocator import CPSharedPagedAllocator, count_lanes, count_tail, lane_of_page
from kvcache.tiered_tree import TieredTree


class HostPages:
    """Accounts count pages. `counts`, cumulative: `evicted_host_pages`."""

    def __init__(
        self, allocator: CPSharedPagedAllocator, tree: TieredTree, counts: Counter[str]
    ) -> None:
        self._allocator = allocator
        self._tree = tree
        self._counts = counts

    @property
    def total_pages(self) -> int:
        return self._allocator.total_pages

    @property
    def free_pages(self) -> int:
        return self._allocator.available_pages

    def alloc_beside(self, device_pages: Sequence[int]) -> list[int] | None:
        """Pages in the lanes of `device_pages`. Where a lane is short, host-only leaves go, oldest
        first, until it has what it needs; None, and nothing has changed, where that would not be
        enough."""
        num_lanes = self._allocator.num_lanes
        needs, available = count_lanes(device_pages, num_lanes), self._allocator.available_by_lane()
        missing = [max(0, need - have) for need, have in zip(needs, available, strict=True)]
        if any(m > most for m, most in zip(missing, self._tree.host_evictable, strict=True)):
            return None
        while any(missing):
            leaf = self._tree.oldest_host_leaf()
            if leaf is None:
                raise AssertionError(f"evictable host pages miscounted: {missing} are missing")
            num_pages, missing = count_tail(leaf.host_pages, missing)
            self._allocator.free(self._tree.trim_host(leaf, num_pages))
            self._counts["evicted_host_pages"] += num_pages
        return self._allocator.alloc_lanes([lane_of_page(page, num_lanes) for page in device_pages])

    def free_dropped(self) -> None:
        """What the tree dropped because its device pages, which had no backup, were evicted."""
        dropped = self._tree.take_dropped()
        self._counts["evicted_host_pages"] += len(dropped)
        self._allocator.free(dropped)

    def free_all(self) -> None:
        """Forget all that only the host has and nobody keeps."""
        while (leaf := self._tree.oldest_host_leaf()) is not None:
            self._allocator.free(self._tree.trim_host(leaf, len(leaf.keys)))

    def check(self) -> None:
        """AssertionError unless tree and allocator agree. O(pages); for tests."""
        self._allocator.check()
        pages = [page for node in self._tree.nodes() for page in node.host_pages]
        if len(set(pages)) != len(pages) or not all(map(self._allocator.is_held, pages)):
            raise AssertionError(f"the tree holds host pages that are free or not its own: {pages}")
        if len(pages) != self._allocator.held_pages:
            raise AssertionError(
                f"{self._allocator.held_pages - len(pages)} host pages have leaked"
            )
