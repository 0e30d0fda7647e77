"""Prefixes that someone wants kept for a time: which, and until when. Knows the tree's count of
pins, not how a cache keeps a pinned node."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable

from kvcache.radix_tree import Node, RadixTree


def monotonic_s() -> int:
    """Whole seconds of a clock that never goes back."""
    return int(time.monotonic())


class Pins:
    """At most one pin a node. `clock` counts seconds in whole numbers; `hold` is what a pin does to
    a node beside being counted, `let_go` undoes it. `counts`, cumulative: `pins_made`, `_refused`,
    `_expired`, `_dropped`."""

    def __init__(
        self,
        tree: RadixTree,
        clock: Callable[[], int],
        counts: Counter[str],
        hold: Callable[[Node], None],
        let_go: Callable[[Node], None],
    ) -> None:
        self._tree = tree
        self._clock = clock
        self._counts = counts
        self._hold = hold
        self._let_go = let_go
        self._until: dict[Node, int] = {}
        # One entry a node, with a deadline that it had; put right when it comes up.
        self._heap: list[tuple[int, int, Node]] = []  # (deadline, serial, node)

    def pin(self, node: Node, num_s: int, most_pages: int) -> bool:
        """Pin the path to `node` for `num_s` seconds from now, or longer where it is already. False
        where more than `most_pages` pages would be pinned then."""
        until = self._clock() + num_s
        if node in self._until:
            self._until[node] = max(until, self._until[node])
            return True
        self.expire()
        new = sum(len(step.keys) for step in self._tree.path(node) if not step.pins)
        if self._tree.num_pinned_pages + new > most_pages:
            self._counts["pins_refused"] += 1
            return False
        self._tree.pin(node)
        self._hold(node)
        self._until[node] = until
        heapq.heappush(self._heap, (until, node.serial, node))
        self._counts["pins_made"] += 1
        return True

    def expire(self) -> None:
        """End those whose time is over."""
        while self._heap and self._heap[0][0] <= self._clock():
            deadline, serial, node = self._heap[0]
            until = self._until[node]
            if until > deadline:
                heapq.heapreplace(self._heap, (until, serial, node))
                continue
            heapq.heappop(self._heap)
            del self._until[node]
            self._unpin(node)
            self._counts["pins_expired"] += 1

    def drop(self) -> bool:
        """End all. False where there is none."""
        nodes = list(self._until)
        self._until.clear()
        self._heap.clear()
        for node in nodes:
            self._unpin(node)
        self._counts["pins_dropped"] += len(nodes)
        return bool(nodes)

    def _unpin(self, node: Node) -> None:
        self._let_go(node)
        self._tree.unpin(node)
