"""What the leader tells the ranks about the host tier: copies, as values of logical pages, to be
put into a step plan as they are. Imports no torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

# When what the device has is backed up: see kvcache.backups.
WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """Copy device_pages[i] to host_pages[i], both [num_pages]; each rank those it owns. Every rank
    reports `id` once, also one that owns none."""

    id: int
    device_pages: list[int]
    host_pages: list[int]  # host_pages[i] lies in the lane of device_pages[i]


class LoadBack(msgspec.Struct, frozen=True, kw_only=True):
    """Copy host_pages[i] to device_pages[i], layer by layer; else as `Backup`. A forward of the
    same plan or a later one waits, at each layer, for that layer's bytes."""

    id: int
    host_pages: list[int]
    device_pages: list[int]  # device_pages[i] lies in the lane of host_pages[i]


HostItem: TypeAlias = Backup | LoadBack


class HostOrders(msgspec.Struct, frozen=True, kw_only=True):
    """One step's copies. They start before its forward, and it waits for the load-backs."""

    load_backs: list[LoadBack] = []
    backups: list[Backup] = []

    def __bool__(self) -> bool:
        return bool(self.load_backs or self.backups)
