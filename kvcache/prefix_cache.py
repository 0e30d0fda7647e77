"""The prefix cache that a scheduler uses: pages by prefix, locked while in use, evicted when short.

Owns the tree; the pages are its `device`'s. Knows token ids and logical pages; no request, no row.

Who owns each [a, b) of a running request's KV, counted in tokens:

    [0, locked)        the tree. `locked` is the end of the node that the request holds a lock on:
                       what it matched, and what it has inserted since. Shared, never freed by it.
    [locked, full)     the request. Full pages, not inserted yet; `insert` gives them to the tree
                       (the request then locks the new node and unlocks the old one).
    [full, computed)   the request. Its last page, in part; never shared.
    [computed, alloc)  the request. Allocated for the tokens to come.

Whatever the request still owns when it ends goes back through `device.free`. At any time
free_pages + held_pages + evictable_pages + locked_pages = total_pages (kvcache.device_pages).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvcache.allocator import CPSharedPagedAllocator
from kvcache.device_pages import DevicePages
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
    """Prefixes over one allocator. Pages are logical, nothing is thread-safe. `events`, where there
    is one, learns of every page that is cached or dropped. `clock` counts whole seconds, for pins.

    `counts`, cumulative: those of Pins and DevicePages, and with a host tier more: see TieredCache.
    """

    def __init__(
        self,
        allocator: CPSharedPagedAllocator,
        events: EventLog | None = None,
        clock: Callable[[], int] = monotonic_s,
    ) -> None:
        counts: Counter[str] = Counter()
        tree = RadixTree(allocator.page_size, allocator.num_lanes, events)
        pins = Pins(tree, clock, counts, tree.lock, tree.unlock)
        device = DevicePages(allocator, tree, pins, counts)
        self._compose(tree, pins, device, counts, events, device.total_pages // PINNED_SHARE)

    def _compose(
        self,
        tree: RadixTree,
        pins: Pins,
        device: DevicePages,
        counts: Counter[str],
        events: EventLog | None,
        most_pinned_pages: int,
    ) -> None:
        self.page_size = tree.page_size
        self.device = device
        self.counts = counts
        self._tree = tree
        self._pins = pins
        self._events = events
        self._most_pinned_pages = most_pinned_pages

    @property
    def pinned_pages(self) -> int:
        """Pages of pinned prefixes, in whichever tier; without a host tier they are locked."""
        return self._tree.num_pinned_pages

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
        self.device.check_own(duplicates + new)
        if new:
            node = self._tree.append(node, keys.slice(num_existing, num_pages), new)
            self.device.give_to_tree(new)
        return Inserted(node, num_existing * self.page_size, cached + new, duplicates)

    def reset(self) -> None:
        """Forget every prefix, also pinned ones. RuntimeError, and no prefix is forgotten, where
        one is locked."""
        self.drop_pins()
        if self.device.locked_pages:
            raise RuntimeError(f"cannot reset: {self.device.locked_pages} pages are locked")
        self.device.evict(self.device.evictable_pages)
        if self._events is not None:
            self._events.reset()

    # What a host tier adds. Without one there is nothing to load back and nothing to copy, so that
    # a scheduler asks the same questions of either.

    def mem_quota(self, num_input_tokens: int) -> int:
        """Tokens that may be loaded back for a request that computes `num_input_tokens` itself, so
        that those and the running requests' next page still find room. Ask before locking."""
        obtainable = self.device.obtainable_pages * self.page_size
        return max(obtainable - (num_input_tokens + self.page_size), 0)

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
        """AssertionError unless tree, pages, counts and events agree. O(pages); for tests."""
        self._tree.check()
        self.device.check()
        if self._events is not None:
            hashes = [page for node in self._tree.nodes() for page in node.hashes]
            num_keys = sum(len(node.keys) for node in self._tree.nodes())
            if len(hashes) != num_keys or self._events.held() != set(hashes):
                raise AssertionError("the event log does not know exactly what the tree holds")
