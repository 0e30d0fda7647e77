"""The prefix cache with a host tier under it: what the device has no room for stays in host memory
and is loaded back when it is asked for.

Owns the copies under way and decides what is loaded back; what is backed up is kvcache.backups' to
decide. Knows logical pages only and moves no bytes: it gives out items (kvcache.host_plan), which
the ranks execute (kvcache.host_tier) and acknowledge.

A copy never crosses ranks: backup allocates host pages in the lanes of the device pages, load-back
allocates device pages in the lanes of the host pages.

The calls, in order:

    match          the device prefix, and what the host has beyond it
    load_back      where that is worth it: a longer match, whose last part is on its way
    lock           as without a host tier, with whichever match; likewise device.alloc
    use            the request does start from this match: counts a hit
    insert         as without; the policy decides what is backed up
    take_orders    at the end of planning a step: its copies, to be put into the plan
    acknowledge    once for each item and rank, in any order, whenever it arrives

A request may be aborted at any time: it unlocks what it has locked. The cache holds its own lock on
a node from the item's making until its last rank has acknowledged it, so no page that a copy reads
or writes is reused before. Events (kvcache.events): a page that leaves the device but stays in host
memory is still held, as loading it back is far cheaper than computing it, so a router is told only
when it has left both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvcache.allocator import CPSharedPagedAllocator
from kvcache.backups import Backups
from kvcache.copies_under_way import CopiesUnderWay
from kvcache.device_pages import DevicePages
from kvcache.events import EventLog
from kvcache.host_pages import HostPages
from kvcache.host_plan import Backup, HostItem, HostOrders, LoadBack, WritePolicy
from kvcache.pins import Pins, monotonic_s
from kvcache.prefix_cache import (
    LOAD_BACK_THRESHOLD,
    PINNED_SHARE,
    Inserted,
    LoadedBack,
    Match,
    PrefixCache,
    SkipReason,
)
from kvcache.radix_tree import Node, PageKeys
from kvcache.tiered_tree import TieredTree

_CLEAN_SHARE = 8  # write_back keeps one page in so many free, so that allocations find some


class TieredCache(PrefixCache):
    """`num_ranks` acknowledge each item: all of the group, whoever owns the pages. Nothing is
    thread-safe. `policy`: see Backups.

    `counts`, cumulative: those of Pins, DevicePages, HostPages and Backups; `load_backs_started`;
    `backups_` and `load_backs_finished`; `loaded_back_tokens`; `load_backs_skipped_` with each
    SkipReason, once a call that found something on the host. A pinned prefix is backed up, whatever
    the policy, and then leaves the device like others, but not the host; until it is backed up it
    is locked.
    """

    _tree: TieredTree

    def __init__(
        self,
        allocator: CPSharedPagedAllocator,
        host_allocator: CPSharedPagedAllocator,
        *,
        policy: WritePolicy = "write_through",
        num_ranks: int | None = None,  # None: one a lane
        events: EventLog | None = None,
        clock: Callable[[], int] = monotonic_s,
    ) -> None:
        ours = (allocator.page_size, allocator.num_lanes)
        theirs = (host_allocator.page_size, host_allocator.num_lanes)
        if ours != theirs:
            raise ValueError(f"(page_size, lanes) is {ours} on the device and {theirs} on the host")
        counts: Counter[str] = Counter()
        tree = TieredTree(allocator.page_size, allocator.num_lanes, events)
        self._host = HostPages(host_allocator, tree, counts)
        self._under_way = CopiesUnderWay(
            allocator.num_lanes if num_ranks is None else num_ranks, allocator.num_lanes
        )
        self._backups = Backups(tree, self._host, self._under_way, policy, counts)
        pins = Pins(tree, clock, counts, self._backups.hold, self._backups.let_go)
        device = DevicePages(allocator, tree, pins, counts, self._host)
        smaller = min(device.total_pages, self._host.total_pages)
        self._compose(tree, pins, device, counts, events, smaller // PINNED_SHARE)

    @property
    def total_host_pages(self) -> int:
        return self._host.total_pages

    @property
    def free_host_pages(self) -> int:
        return self._host.free_pages

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def items_under_way(self) -> list[HostItem]:
        """Those items, oldest first."""
        return [under_way.item for under_way in self._under_way.all()]

    # -- what a request asks

    def match(self, token_ids: Sequence[int]) -> Match:
        """As PrefixCache.match, and what the host has beyond; no hit is counted: see `use`."""
        keys = PageKeys(token_ids, self.page_size)
        node, pages = self._tree.walk(keys)
        beyond = self._tree.walk_host(keys, node, len(pages))
        num_host_tokens = sum(len(step.keys) for step in beyond) * self.page_size
        last = beyond[-1] if beyond else None
        return Match(pages, node, len(pages) * self.page_size, num_host_tokens, last)

    def use(self, match: Match) -> None:
        """Count a hit: a request starts from `match`. It is what `write_through_selective` goes by,
        and gives what could not be backed up before another chance."""
        self._backups.used(match.node)

    def load_back(
        self, match: Match, *, mem_quota: int, threshold: int = LOAD_BACK_THRESHOLD
    ) -> LoadedBack | SkipReason:
        """Bring the host part of a fresh `match` back: one item for all of its nodes, whose copy
        starts with the next orders. `mem_quota` and `threshold` in tokens.

        Else why not, and nothing is locked or allocated: "threshold", there are fewer tokens than
        that; "quota", more than `mem_quota`, less what this match itself keeps from eviction;
        "no_device_pages", not even after eviction. The request then computes that part.
        RuntimeError where the match is not fresh.
        """
        last = match.host_node
        if last is None:
            return "threshold"
        if match.num_host_tokens < threshold:
            return self._skip("threshold")
        nodes = [step for step in self._tree.path(last) if not step.pages][::-1]
        host_pages = [page for step in nodes for page in step.host_pages]
        if len(host_pages) * self.page_size != match.num_host_tokens:
            raise RuntimeError("the match is old: what it has beyond was loaded or evicted since")
        locked_before = self.device.locked_pages
        self.lock(last)
        newly_locked = (self.device.locked_pages - locked_before) * self.page_size
        if match.num_host_tokens > mem_quota - newly_locked:
            self.unlock(last)
            return self._skip("quota")
        device_pages = self.device.alloc_beside(host_pages)
        if device_pages is None:
            self.unlock(last)
            return self._skip("no_device_pages")
        at = 0
        for step in nodes:
            self._tree.give_pages(step, device_pages[at : at + len(step.keys)])
            at += len(step.keys)
        self.device.give_to_tree(device_pages)
        item = self._under_way.load_back(last, host_pages, device_pages)  # with the lock from above
        self.counts["load_backs_started"] += 1
        self.counts["loaded_back_tokens"] += match.num_host_tokens
        pages = match.pages + device_pages
        return LoadedBack(Match(pages, last, len(pages) * self.page_size), item)

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], after: Node | None = None
    ) -> Inserted:
        """As PrefixCache.insert. Where the host alone has a part of the span, its nodes get the
        caller's pages beside their host pages."""
        inserted = super().insert(token_ids, pages, after)
        self._backups.inserted(inserted.node)
        return inserted

    # -- what the step plan takes, and what the ranks say

    def take_orders(self) -> HostOrders:
        """The copies that begin with this step; call it once all of the step is decided."""
        self._pins.expire()
        if self._backups.policy == "write_back":
            self.reclaim(self.device.total_pages // _CLEAN_SHARE)
        self._backups.start_due()
        return self._under_way.take_orders()

    def acknowledge(self, item_id: int, rank: int) -> bool:
        """Rank `rank` has done its part of an item. True with the last rank's: the item's node is
        unlocked. ValueError for an item that is not under way, a rank that is not there or one that
        has acknowledged it before."""
        under_way = self._under_way.acknowledge(item_id, rank)
        if under_way is None:
            return False
        self.unlock(under_way.node)
        kind = "load_backs" if isinstance(under_way.item, LoadBack) else "backups"
        self.counts[f"{kind}_finished"] += 1
        return True

    def reclaim(self, num_pages: int) -> bool:
        """`write_back`: see to it that `num_pages` pages come free without loss, the oldest first:
        what the host has leaves the device, what it has not is backed up and leaves when that is
        acknowledged and this is called again. True where they are free already. A scheduler that
        would rather wait than lose cached pages asks before it allocates; an allocation for which
        there is not enough room drops what has no backup."""
        self._pins.expire()
        missing = num_pages - self.device.free_pages
        missing -= sum(len(i.device_pages) for i in self.items_under_way if isinstance(i, Backup))
        while missing > 0 and (leaf := self._tree.oldest_leaf()) is not None:
            if leaf.host_pages:
                missing -= self.device.drop(leaf, min(missing, len(leaf.pages)))
            elif self._backups.start(leaf):
                missing -= len(leaf.pages)
            else:
                break
        return self.device.free_pages >= num_pages

    def reset(self) -> None:
        """Forget every prefix in both tiers. RuntimeError, and nothing has changed, where one is
        locked, as by a copy under way."""
        self.drop_pins()
        if any(child.locks for child in self._tree.root.children.values()):
            raise RuntimeError(
                f"cannot reset: {self.device.locked_pages} pages are locked, "
                f"{self.num_under_way} copies are under way"
            )
        self.device.evict(self.device.evictable_pages)
        self._host.free_all()
        self._backups.forget()
        super().reset()

    def check(self) -> None:
        """As PrefixCache.check, for both tiers and the items under way."""
        super().check()
        self._host.check()
        for under_way in self._under_way.all():
            item, path = under_way.item, list(self._tree.path(under_way.node))[::-1]
            device = [page for step in path for page in step.pages]
            host = [page for step in path for page in step.host_pages]
            num = len(item.device_pages)
            if device[-num:] != item.device_pages or host[-num:] != item.host_pages:
                raise AssertionError(f"pages under way have moved: {item}")

    def _skip(self, reason: SkipReason) -> SkipReason:
        self.counts[f"load_backs_skipped_{reason}"] += 1
        return reason
