"""The items that the leader has made and not all ranks have acknowledged yet. Owns their numbers
and who has reported; knows no tree: a node is what its caller gets back.

The one invariant: a copy never crosses ranks, so in every item the owner of device_pages[i] is the
owner of host_pages[i]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache.allocator import lane_of_page
from kvcache.host_plan import Backup, HostItem, HostOrders, LoadBack
from kvcache.radix_node import Node


@dataclass(slots=True)
class UnderWay:
    item: HostItem
    node: Node  # the last of the item's nodes, which its maker has locked
    ranks: set[int] = field(default_factory=set)  # that have acknowledged


class CopiesUnderWay:
    """Each item is acknowledged exactly once by each of `num_ranks` ranks, in any order; its pages
    lie in `num_lanes` lanes."""

    def __init__(self, num_ranks: int, num_lanes: int) -> None:
        if num_ranks <= 0:
            raise ValueError(f"num_ranks must be positive, got {num_ranks}")
        self._num_ranks = num_ranks
        self._num_lanes = num_lanes
        self._by_id: dict[int, UnderWay] = {}
        self._num_items = 0
        self._load_backs: list[LoadBack] = []  # for the next orders
        self._backups: list[Backup] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[UnderWay]:
        """Oldest first."""
        return list(self._by_id.values())

    def load_back(
        self, node: Node, host_pages: Sequence[int], device_pages: Sequence[int]
    ) -> LoadBack:
        """A new item, for the next orders."""
        item = LoadBack(
            id=self._num_items + 1, host_pages=list(host_pages), device_pages=list(device_pages)
        )
        self._add(item, node)
        self._load_backs.append(item)
        return item

    def back_up(self, node: Node) -> Backup:
        """A new item, for the next orders: all of `node`, from the device to the host."""
        item = Backup(
            id=self._num_items + 1,
            device_pages=list(node.pages),
            host_pages=list(node.host_pages),
        )
        self._add(item, node)
        self._backups.append(item)
        return item

    def _check_lanes(self, item: HostItem) -> None:
        """AssertionError where it would cross ranks."""
        for device, host in zip(item.device_pages, item.host_pages, strict=True):
            if lane_of_page(device, self._num_lanes) != lane_of_page(host, self._num_lanes):
                raise AssertionError(
                    f"device page {device} and host page {host} lie on different ranks of "
                    f"{self._num_lanes}: {item.device_pages}, {item.host_pages}"
                )

    def _add(self, item: HostItem, node: Node) -> None:
        self._check_lanes(item)
        self._num_items += 1
        self._by_id[item.id] = UnderWay(item, node)

    def take_orders(self) -> HostOrders:
        """The items made since the last call."""
        orders = HostOrders(load_backs=self._load_backs, backups=self._backups)
        self._load_backs, self._backups = [], []
        return orders

    def acknowledge(self, item_id: int, rank: int) -> UnderWay | None:
        """The item, which is under way no more, with the last rank's word. ValueError for an item
        that is not under way, a rank that is not there or one that has acknowledged it before."""
        under_way = self._by_id.get(item_id)
        if under_way is None:
            raise ValueError(f"item {item_id} is not under way; those are {sorted(self._by_id)}")
        if not 0 <= rank < self._num_ranks or rank in under_way.ranks:
            waiting = sorted(set(range(self._num_ranks)) - under_way.ranks)
            raise ValueError(f"item {item_id} waits for the ranks {waiting}, got rank {rank}")
        under_way.ranks.add(rank)
        if len(under_way.ranks) < self._num_ranks:
            return None
        del self._by_id[item_id]
        return under_way
