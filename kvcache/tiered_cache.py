"""The prefix cache with a host tier under it: what the device has no room for stays in host memory
and is loaded back when it is asked for.

Owns the host pages and the copies under way; decides what is backed up and loaded back. Knows
logical pages only and moves no bytes: it gives out items (kvcache.host_plan), which the ranks
execute (kvcache.host_tier) and acknowledge.

The one invariant: a copy never crosses ranks, so in every item the owner of device_pages[i] is the
owner of host_pages[i]. Backup allocates host pages in the lanes of the device pages, load-back
allocates device pages in the lanes of the host pages.

The calls, in order:

    match          the device prefix, and what the host has beyond it
    load_back      where that is worth it: a longer match, whose last part is on its way
    lock, alloc    as without a host tier, with whichever match
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

from collections.abc import Callable, Sequence
from typing import get_args

from kvcache.allocator import CPSharedPagedAllocator, count_lanes, lane_of_page
from kvcache.copies_under_way import CopiesUnderWay
from kvcache.events import EventLog
from kvcache.host_plan import Backup, HostItem, HostOrders, LoadBack, WritePolicy
from kvcache.pins import monotonic_s
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

_SELECTIVE_HITS = 2
_CLEAN_SHARE = 8  # write_back keeps one page in so many free, so that allocations find some


class TieredCache(PrefixCache):
    """`num_ranks` acknowledge each item: all of the group, whoever owns the pages. Nothing is
    thread-safe.

    `counts`, cumulative: `backups_` and `load_backs_started`, `_finished`; `loaded_back_tokens`;
    `backups_skipped_no_host_pages`; `load_backs_skipped_` with each SkipReason, once a call that
    found something on the host; `evicted_device_pages`, `dropped_device_pages` (those of them that
    had no backup), `evicted_host_pages`. A pinned prefix is backed up, whatever the policy, and
    then leaves the device like others, but not the host; until it is backed up it is locked.

    Policies: `write_through` backs up what is inserted; `write_through_selective` what was used
    twice; `write_back` what is about to be evicted from the device. A node that cannot be backed
    up, as its lanes of the host tier are full of what may not leave, stays on the device only.
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
        if policy not in get_args(WritePolicy):
            raise ValueError(
                f"--hicache-write-policy {policy}: accepted are {', '.join(get_args(WritePolicy))}"
            )
        super().__init__(allocator, events, clock)
        self.policy: WritePolicy = policy
        self._host = host_allocator
        self._under_way = CopiesUnderWay(allocator.num_lanes if num_ranks is None else num_ranks)
        self._due: dict[Node, None] = {}  # to be backed up, in order
        self._held: dict[Node, None] = {}  # pinned, and locked until the host has them

    def _new_tree(self, events: EventLog | None) -> TieredTree:
        return TieredTree(self.page_size, self._allocator.num_lanes, events)

    # -- accounts

    @property
    def total_host_pages(self) -> int:
        return self._host.total_pages

    @property
    def free_host_pages(self) -> int:
        return self._host.available_pages

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def items_under_way(self) -> list[HostItem]:
        """Those items, oldest first."""
        return [under_way.item for under_way in self._under_way.all()]

    def state_str(self) -> str:
        host_size = (self.total_host_pages - self.free_host_pages) * self.page_size
        return (
            f"{super().state_str()} host_size={host_size} "
            f"of {self.total_host_pages * self.page_size} copies_under_way={self.num_under_way}"
        )

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
        needed = {"write_through": 1, "write_through_selective": _SELECTIVE_HITS}.get(self.policy)
        for step in self._tree.path(match.node):
            step.hits += 1
            if needed is not None and step.hits >= needed and not step.host_pages:
                self._due[step] = None

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
        locked_before = self.locked_pages
        self.lock(last)
        newly_locked = (self.locked_pages - locked_before) * self.page_size
        if match.num_host_tokens > mem_quota - newly_locked:
            self.unlock(last)
            return self._skip("quota")
        device_pages = self._alloc_beside(host_pages)
        if device_pages is None:
            self.unlock(last)
            return self._skip("no_device_pages")
        self._check_lanes(device_pages, host_pages)
        at = 0
        for step in nodes:
            self._tree.give_pages(step, device_pages[at : at + len(step.keys)])
            at += len(step.keys)
        for page in device_pages:
            self._is_cached[page] = 1
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
        if self.policy == "write_through":
            for step in self._tree.path(inserted.node):
                if step.host_pages:
                    break
                self._due[step] = None
        return inserted

    # -- what the step plan takes, and what the ranks say

    def take_orders(self) -> HostOrders:
        """The copies that begin with this step; call it once all of the step is decided."""
        self._pins.expire()
        if self.policy == "write_back":
            self.reclaim(self.total_pages // _CLEAN_SHARE)
        due, self._due = self._due, {}
        for node in due:
            self._back_up_path(node)
        if due:
            for node in [node for node in self._held if self._is_backed_up(node)]:
                self._let_go(node)
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
        would rather wait than lose cached pages asks before it allocates; an `alloc` for which
        there is not enough room drops what has no backup."""
        missing = num_pages - self.free_pages
        missing -= sum(len(i.device_pages) for i in self.items_under_way if isinstance(i, Backup))
        while missing > 0 and (leaf := self._tree.oldest_leaf()) is not None:
            if leaf.host_pages:
                missing -= self._drop(leaf, min(missing, len(leaf.pages)))
            elif self._back_up(leaf):
                missing -= len(leaf.pages)
            else:
                break
        return self.free_pages >= num_pages

    def reset(self) -> None:
        """Forget every prefix in both tiers. RuntimeError, and nothing has changed, where one is
        locked, as by a copy under way."""
        self.drop_pins()
        if any(child.locks for child in self._tree.root.children.values()):
            raise RuntimeError(
                f"cannot reset: {self.locked_pages} pages are locked, {self.num_under_way} copies "
                "are under way"
            )
        self.evict(self.evictable_pages)
        while (leaf := self._tree.oldest_host_leaf()) is not None:
            self._host.free(self._tree.trim_host(leaf, len(leaf.keys)))
        self._due.clear()
        super().reset()

    def check(self) -> None:
        """As PrefixCache.check, for both tiers and the items under way."""
        super().check()
        self._host.check()
        pages = [page for node in self._tree.nodes() for page in node.host_pages]
        if len(set(pages)) != len(pages) or not all(map(self._host.is_held, pages)):
            raise AssertionError(f"the tree holds host pages that are free or not its own: {pages}")
        if len(pages) != self._host.held_pages:
            raise AssertionError(f"{self._host.held_pages - len(pages)} host pages have leaked")
        for under_way in self._under_way.all():
            item, path = under_way.item, list(self._tree.path(under_way.node))[::-1]
            device = [page for step in path for page in step.pages]
            host = [page for step in path for page in step.host_pages]
            num = len(item.device_pages)
            if device[-num:] != item.device_pages or host[-num:] != item.host_pages:
                raise AssertionError(f"pages under way have moved: {item}")

    # -- inside

    @property
    def _most_pinned_pages(self) -> int:
        return min(super()._most_pinned_pages, self.total_host_pages // PINNED_SHARE)

    def _hold(self, node: Node) -> None:
        if not self._is_backed_up(node):
            self._due |= {step: None for step in self._tree.path(node) if not step.host_pages}
            self._held[node] = None
            self.lock(node)

    def _let_go(self, node: Node) -> None:
        if node in self._held:
            del self._held[node]
            self.unlock(node)

    def _is_backed_up(self, node: Node) -> bool:
        """All of its path is in the host tier, or on the way there."""
        return all(step.host_pages for step in self._tree.path(node))

    def _skip(self, reason: SkipReason) -> SkipReason:
        self.counts[f"load_backs_skipped_{reason}"] += 1
        return reason

    def _back_up_path(self, node: Node) -> None:
        """Back up `node` and what is above it and has no backup, from above: below a node that was
        never backed up, host pages would be lost with it."""
        if not node.pages:  # evicted since
            return
        missing = []
        for step in self._tree.path(node):
            if step.host_pages:
                break
            missing.append(step)
        for step in reversed(missing):
            if not self._back_up(step):
                break

    def _back_up(self, node: Node) -> bool:
        """False where the host has no room in the lanes it needs."""
        host_pages = self._alloc_host_beside(node.pages)
        if host_pages is None:
            self.counts["backups_skipped_no_host_pages"] += 1
            return False
        self._check_lanes(node.pages, host_pages)
        self._tree.set_host(node, host_pages)
        self.lock(node)
        self._under_way.back_up(node)
        self.counts["backups_started"] += 1
        return True

    def _alloc_beside(self, host_pages: Sequence[int]) -> list[int] | None:
        """Device pages in the lanes of `host_pages`, evicting what is needed; None, and nothing has
        changed, where that would not be enough."""
        num_lanes = self._allocator.num_lanes
        needs = count_lanes(host_pages, num_lanes)
        if any(need > m for need, m in zip(needs, self._obtainable_by_lane(), strict=True)):
            return None
        self._make_room(needs)
        return self._allocator.alloc_lanes([lane_of_page(page, num_lanes) for page in host_pages])

    def _alloc_host_beside(self, device_pages: Sequence[int]) -> list[int] | None:
        """Host pages in the lanes of `device_pages`. Where a lane is short, host-only leaves go,
        oldest first, until it has the pages it needs; None, and nothing has changed, where that
        would not be enough."""
        self._pins.expire()
        num_lanes = self._host.num_lanes
        pairs = zip(
            count_lanes(device_pages, num_lanes), self._host.available_by_lane(), strict=True
        )
        missing = [max(0, need - have) for need, have in pairs]
        if any(m > most for m, most in zip(missing, self._tree.host_evictable, strict=True)):
            return None
        while any(count > 0 for count in missing):
            leaf = self._tree.oldest_host_leaf()
            if leaf is None:
                raise AssertionError(f"evictable host pages miscounted: {self.state_str()}")
            num_pages = _tail(leaf.host_pages, missing)
            self._host.free(self._tree.trim_host(leaf, num_pages))
            self.counts["evicted_host_pages"] += num_pages
        return self._host.alloc_lanes([lane_of_page(page, num_lanes) for page in device_pages])

    def _drop(self, leaf: Node, num_pages: int) -> int:
        self.counts["evicted_device_pages"] += num_pages
        if not leaf.host_pages:
            self.counts["dropped_device_pages"] += num_pages
        super()._drop(leaf, num_pages)
        dropped = self._tree.take_dropped()
        self.counts["evicted_host_pages"] += len(dropped)
        self._host.free(dropped)
        return num_pages

    def _check_lanes(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        num_lanes = self._allocator.num_lanes
        for device, host in zip(device_pages, host_pages, strict=True):
            if lane_of_page(device, num_lanes) != lane_of_page(host, num_lanes):
                raise AssertionError(
                    f"device page {device} and host page {host} lie on different ranks of "
                    f"{num_lanes}: {list(device_pages)}, {list(host_pages)}"
                )


def _tail(pages: Sequence[int], missing: list[int]) -> int:
    """How many of `pages`, from the last on, go until missing[lane] of each lane have gone or none
    is left; `missing` goes down with them."""
    num_pages = 0
    for page in reversed(pages):
        if not any(count > 0 for count in missing):
            break
        missing[lane_of_page(page, len(missing))] -= 1
        num_pages += 1
    return num_pages
