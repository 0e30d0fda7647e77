"""The prefix cache that a scheduler uses: pages by prefix, locked while in use, evicted when short.

Owns the tree and decides what is evicted. Knows token ids and logical pages; no request, no row.

Who owns each [a, b) of a running request's KV, counted in tokens:

    [0, locked)        the tree. `locked` is the end of the node that the request holds a lock on:
                       what it matched, and what it has inserted since. Shared, never freed by it.
    [locked, full)     the request. Full pages, not inserted yet; `insert` gives them to the tree
                       (the request then locks the new node and unlocks the old one).
    [full, computed)   the request. Its last page, in part; never shared.
    [computed, alloc)  the request. Allocated for the tokens to come.

Whatever the request still owns when it ends goes back through `free`. At any time
free_pages + held_pages + evictable_pages + locked_pages = total_pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvcache.allocator import CPSharedPagedAllocator, lane_of_page
from kvcache.events import EventLog
from kvcache.host_plan import HostOrders, LoadBack
from kvcache.pins import Pins, monotonic_s
from kvcache.radix_tree import Node, PageKeys, RadixTree

__all__ = [
    "LOAD_BACK_THRESHOLD",
    "Inserted",
    "LoadedBack",
    "Match",
    "Node",
    "PrefixCache",
    "SkipReason",
]

SkipReason: TypeAlias = Literal["threshold", "quota", "no_device_pages"]

LOAD_BACK_THRESHOLD = 10  # tokens
PINNED_SHARE = 2  # pins keep one page in so many, at most


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix in full pages. Lock `node` before the next alloc or evict.

    The last two are set by a cache with a host tier (kvcache.tiered_cache), whose `load_back` takes
    them: what lies beyond the prefix in host memory only.
    """

    pages: list[int]  # [num_tokens / page_size]
    node: Node
    num_tokens: int
    num_host_tokens: int = 0  # whole pages
    host_node: Node | None = None  # the last node of those


@dataclass(frozen=True, slots=True)
class LoadedBack:
    """`match` is the longer one: its node is on the device, its last part while the copy runs."""

    match: Match
    item: LoadBack


@dataclass(frozen=True, slots=True)
class Inserted:
    """What the tree holds for an inserted span. `node` is not locked yet: lock it at once."""

    node: Node
    num_existing_tokens: int  # of the span, those that the tree had before
    pages: list[int]  # the tree's pages for the whole span; they replace the caller's
    duplicates: list[int]  # the caller's pages that those replace: still the caller's, to free


class PrefixCache:
    """Prefixes over one allocator. Pages are logical, accounts count pages, nothing is
    thread-safe. `events`, where there is one, learns of every page that is cached or dropped.
    `clock` counts whole seconds, for pins.

    `counts`, cumulative: those of Pins, and with a host tier more: see TieredCache."""

    def __init__(
        self,
        allocator: CPSharedPagedAllocator,
        events: EventLog | None = None,
        clock: Callable[[], int] = monotonic_s,
    ) -> None:
        self._allocator = allocator
        self.page_size = allocator.page_size
        self._tree = self._new_tree(events)
        self._events = events
        self._is_cached = bytearray(allocator.total_pages + 1)  # by page: 1 where it is the tree's
        self._last_eviction = (0, 0)  # pages asked for, pages evicted
        self.counts: Counter[str] = Counter()
        self._pins = Pins(self._tree, clock, self.counts, self._hold, self._let_go)

    def _new_tree(self, events: EventLog | None) -> RadixTree:
        return RadixTree(self.page_size, self._allocator.num_lanes, events)

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

    def used_pages_by_lane(self) -> list[int]:
        """Pages that are not free, by lane: how evenly the ranks are filled."""
        per_lane = self.total_pages // self._allocator.num_lanes
        return [per_lane - free for free in self._allocator.available_by_lane()]

    @property
    def obtainable_pages(self) -> int:
        """What `alloc` is sure to get now, free or evictable: the smallest lane times the lanes."""
        return min(self._obtainable_by_lane()) * self._allocator.num_lanes

    @property
    def pinned_pages(self) -> int:
        """Pages of pinned prefixes, in whichever tier; without a host tier they are locked."""
        return self._tree.num_pinned_pages

    def state_str(self) -> str:
        """For messages about missing pages; sizes in tokens."""
        asked, evicted = self._last_eviction
        return (
            f"{self._allocator.allocator_state_str()} "
            f"evictable_size={self.evictable_pages * self.page_size} "
            f"obtainable_size={self.obtainable_pages * self.page_size} "
            f"last_eviction=[asked_pages={asked}, evicted_pages={evicted}]"
        )

    def match(self, token_ids: Sequence[int]) -> Match:
        """The longest cached prefix of `token_ids`, never longer than they are. A caller that must
        compute at least one token leaves the last one out. Costs what matches, not more."""
        node, pages = self._tree.walk(PageKeys(token_ids, self.page_size))
        for step in self._tree.path(node):
            step.hits += 1
        return Match(pages, node, len(pages) * self.page_size)

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from eviction. Locks are counted. RuntimeError where `node` was
        evicted since the match."""
        self._tree.lock(node)

    def unlock(self, node: Node) -> None:
        """Undo one lock. RuntimeError where `node` is not locked."""
        self._tree.unlock(node)

    def pin(self, node: Node, num_s: int) -> bool:
        """Keep the path to `node`, which the caller has locked, in the cache for `num_s` seconds
        from now. A longer time wins over one that it was pinned for before. False, and it is not
        pinned, where pins would keep more than half of the pages."""
        return node is self._tree.root or self._pins.pin(node, num_s, self._most_pinned_pages)

    def drop_pins(self) -> bool:
        """Forget all pins: without that something could never run. False where there is none."""
        return self._pins.drop()

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], after: Node | None = None
    ) -> Inserted:
        """Give the full pages of `token_ids` to the tree; `pages` holds at least as many, and what
        goes beyond stays the caller's. Where the tree has other pages for a part of the span, those
        stay, and the caller frees its own once nobody reads them any more.

        With `after`, a node that the caller has locked, the span begins where that node ends (else
        at the first token) and nothing before it is read. ValueError, and no page has moved, where
        there are too few pages or one is neither the caller's nor the tree's for its place.
        RuntimeError where `after` is not locked.
        """
        if after is not None and after is not self._tree.root and not after.locks:
            raise RuntimeError("cannot insert after a node that is not locked")
        keys = PageKeys(token_ids, self.page_size)
        num_pages = keys.num_pages
        if len(pages) < num_pages:
            raise ValueError(
                f"{len(token_ids)} tokens fill {num_pages} pages of {self.page_size}, "
                f"got {len(pages)} pages"
            )
        node, cached = self._tree.walk(keys, after)
        num_existing = len(cached)
        duplicates = [page for page, kept in zip(pages, cached, strict=False) if page != kept]
        new = list(pages[num_existing:num_pages])
        self._check_callers(duplicates + new)
        if new:
            node = self._tree.append(node, keys.slice(num_existing, num_pages), new)
            for page in new:
                self._is_cached[page] = 1
        return Inserted(node, num_existing * self.page_size, cached + new, duplicates)

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

    def _make_room(self, needs: Sequence[int]) -> None:
        """Evict until needs[lane] pages of each lane are free; the caller knows that it can be."""
        available = self._allocator.available_by_lane()
        self._evict_lanes([max(0, n - have) for n, have in zip(needs, available, strict=True)])

    def free(self, pages: Sequence[int]) -> None:
        """Give back pages that a request owns. ValueError, and nothing has changed, where one is
        the tree's, free or named twice."""
        self._check_callers(pages)
        self._allocator.free(pages)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, least recently used first; how many it was."""
        self._pins.expire()
        num_evicted = 0
        while num_evicted < num_pages and (leaf := self._tree.oldest_leaf()) is not None:
            num_evicted += self._drop(leaf, min(num_pages - num_evicted, len(leaf.pages)))
        self._last_eviction = (num_pages, num_evicted)
        return num_evicted

    def reset(self) -> None:
        """Forget every prefix, also pinned ones. RuntimeError, and no prefix is forgotten, where
        one is locked."""
        self.drop_pins()
        if self.locked_pages:
            raise RuntimeError(f"cannot reset: {self.locked_pages} pages are locked")
        self.evict(self.evictable_pages)
        if self._events is not None:
            self._events.reset()

    # What a host tier adds. Without one there is nothing to load back and nothing to copy, so that
    # a scheduler asks the same questions of either.

    def mem_quota(self, num_input_tokens: int) -> int:
        """Tokens that may be loaded back for a request that computes `num_input_tokens` itself, so
        that those and the running requests' next page still find room. Ask before locking."""
        return max(self.obtainable_pages * self.page_size - (num_input_tokens + self.page_size), 0)

    def load_back(
        self, match: Match, *, mem_quota: int, threshold: int = LOAD_BACK_THRESHOLD
    ) -> LoadedBack | SkipReason:
        """See TieredCache.load_back."""
        return "threshold"

    def use(self, match: Match) -> None:
        """A request starts from `match`: see TieredCache.use. Here `match` has counted the hit."""

    def take_orders(self) -> HostOrders:
        """The copies that begin with this step. Pins whose time is over end here at the latest."""
        self._pins.expire()
        return HostOrders()

    def acknowledge(self, item_id: int, rank: int) -> bool:
        """See TieredCache.acknowledge. Here no item is ever under way: ValueError."""
        raise ValueError(f"item {item_id} is not under way; there is no host tier")

    @property
    def total_host_pages(self) -> int:
        return 0

    @property
    def free_host_pages(self) -> int:
        return 0

    @property
    def num_under_way(self) -> int:
        """Copies that some rank has not acknowledged yet. While there are any, pages may come free
        without a request's doing."""
        return 0

    def check(self) -> None:
        """AssertionError unless tree, allocator and counts agree. O(pages); for tests."""
        self._allocator.check()
        self._tree.check()
        pages = [page for node in self._tree.nodes() for page in node.pages]
        flagged = [page for page, is_cached in enumerate(self._is_cached) if is_cached]
        if sorted(pages) != flagged:
            raise AssertionError(f"the tree holds pages {sorted(pages)}, flagged are {flagged}")
        if not all(map(self._allocator.is_held, pages)):
            raise AssertionError("the tree holds a page that is free")
        if self._events is not None:
            hashes = [page for node in self._tree.nodes() for page in node.hashes]
            num_keys = sum(len(node.keys) for node in self._tree.nodes())
            if len(hashes) != num_keys or self._events.held() != set(hashes):
                raise AssertionError("the event log does not know exactly what the tree holds")

    def _evict_lanes(self, missing: list[int]) -> None:
        """Evict until missing[lane] pages of each lane are freed; the caller knows that there are
        so many. Of a leaf, no more goes than its tail down to the last page that is wanted."""
        num_asked, num_evicted = sum(missing), 0
        while any(count > 0 for count in missing):
            leaf = self._tree.oldest_leaf()
            if leaf is None:
                raise AssertionError(f"evictable pages miscounted: {self.state_str()}")
            num_pages = 0
            for page in reversed(leaf.pages):
                if not any(count > 0 for count in missing):
                    break
                missing[lane_of_page(page, len(missing))] -= 1
                num_pages += 1
            num_evicted += self._drop(leaf, num_pages)
        self._last_eviction = (num_asked, num_evicted)

    def _drop(self, leaf: Node, num_pages: int) -> int:
        pages = self._tree.trim(leaf, num_pages)
        for page in pages:
            self._is_cached[page] = 0
        self._allocator.free(pages)
        return len(pages)

    @property
    def _most_pinned_pages(self) -> int:
        return self.total_pages // PINNED_SHARE

    def _hold(self, node: Node) -> None:
        """What a pin does beside being counted."""
        self.lock(node)

    def _let_go(self, node: Node) -> None:
        self.unlock(node)

    def _obtainable_by_lane(self) -> list[int]:
        self._pins.expire()
        available = self._allocator.available_by_lane()
        return [a + b for a, b in zip(available, self._tree.evictable, strict=True)]

    def _check_callers(self, pages: Sequence[int]) -> None:
        """ValueError unless the pages are a request's own, each named once."""
        for page in pages:
            if not self._allocator.is_held(page) or self._is_cached[page]:
                owner = "the prefix cache's" if self._allocator.is_held(page) else "not allocated"
                raise ValueError(f"page {page} is {owner}; only a request's own page can be given")
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is named twice in {list(pages)}")
