"""Prefixes that someone wants kept for a time: until when. Knows no tree; whoever asks what has run
out acts on it."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

from kvcache.radix_node import Node


def monotonic_s() -> int:
    """Whole seconds of a clock that never goes back."""
    return int(time.monotonic())


class Pins:
    """At most one pin a node. `clock` counts seconds in whole numbers."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._until: dict[Node, int] = {}
        # One entry a node, with a deadline that it had; put right when it comes up.
        self._heap: list[tuple[int, int, Node]] = []  # (deadline, serial, node)

    def __len__(self) -> int:
        return len(self._until)

    def extend(self, node: Node, num_s: int) -> bool:
        """Keep a pin for `num_s` seconds from now, where that is longer. False: there is none."""
        until = self._until.get(node)
        if until is None:
            return False
        self._until[node] = max(until, self._clock() + num_s)
        return True

    def add(self, node: Node, num_s: int) -> None:
        """A node that has none gets a pin for `num_s` seconds."""
        self._until[node] = until = self._clock() + num_s
        heapq.heappush(self._heap, (until, node.serial, node))

    def take_expired(self) -> list[Node]:
        """The nodes whose time is over; they have no pin any more."""
        expired: list[Node] = []
        while self._heap and self._heap[0][0] <= self._clock():
            deadline, serial, node = self._heap[0]
            until = self._until[node]
            if until > deadline:
                heapq.heapreplace(self._heap, (until, serial, node))
                continue
            heapq.heappop(self._heap)
            del self._until[node]
            expired.append(node)
        return expired

    def take_all(self) -> list[Node]:
        """Every node that has a pin; none has one any more."""
        nodes = list(self._until)
        self._until.clear()
        self._heap.clear()
        return nodes
