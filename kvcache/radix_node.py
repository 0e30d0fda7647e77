"""A node of the radix tree, and the order in which nodes may be dropped. Knows no tree."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable


class Node:
    """A span of pages below its parent's. Everything that belongs to the span lies here and is cut
    at the same page border by `RadixTree._split`.

    Residency: a span is in the device tier (`pages`), in the host tier (`host_pages`) or in both.
    Below a node that is not in the device tier nothing is.

    `locks` counts the holders of this node or of one below it, so a parent is locked at least as
    often as its children together; a locked node leaves neither tier. `pins` counts likewise who
    wants it remembered: a pinned node never leaves the last tier. `tick` is that of the last walk
    over the node; a parent's is never older than its child's. `hits` counts the uses that went over
    the node.
    """

    __slots__ = (
        "children",
        "hashes",
        "hits",
        "host_lanes",
        "host_pages",
        "keys",
        "lanes",
        "locks",
        "num_resident",
        "pages",
        "parent",
        "pins",
        "serial",
        "tick",
    )

    def __init__(
        self,
        parent: Node | None,
        keys: list[bytes],
        pages: list[int],
        hashes: list[bytes],
        lanes: list[int],
        serial: int,
    ) -> None:
        self.parent = parent  # None: the root, or dropped from the tree
        self.children: dict[bytes, Node] = {}  # by the child's first key
        self.num_resident = 0  # children in the device tier
        self.keys = keys  # [num_pages]
        self.pages = pages  # [num_pages] logical; empty: not in the device tier
        self.host_pages: list[int] = []  # [num_pages] logical; empty: not in the host tier
        self.hashes = hashes  # [num_pages]; empty where nobody is told
        self.lanes = lanes  # [num_lanes] of `pages`, those in each lane
        self.host_lanes = [0] * len(lanes)  # [num_lanes] of `host_pages`
        self.locks = 0
        self.pins = 0
        self.hits = 0
        self.tick = 0
        self.serial = serial  # order of creation: breaks ties, the same in every run


class LeafHeap:
    """The nodes that may leave a tier, by tick. `is_leaf` says whether one may.

    A node has at most one entry, which is put right when it comes up (touched since, or no leaf any
    more), so no operation scans the tree.
    """

    def __init__(self, is_leaf: Callable[[Node], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, int, Node]] = []  # (tick, serial, node)
        self._members: set[int] = set()  # serials

    def offer(self, node: Node) -> None:
        """Enter `node` where it is a leaf now."""
        if node.serial not in self._members and self._is_leaf(node):
            self._members.add(node.serial)
            heapq.heappush(self._heap, (node.tick, node.serial, node))

    def oldest(self) -> Node | None:
        """The leaf that was used least recently; it stays entered. None where there is none."""
        while self._heap:
            tick, _, node = self._heap[0]
            if not self._is_leaf(node):
                heapq.heappop(self._heap)
                self._members.discard(node.serial)
            elif tick != node.tick:
                heapq.heapreplace(self._heap, (node.tick, node.serial, node))
            else:
                return node
        return None

    def check(self, nodes: Iterable[Node]) -> None:
        """AssertionError unless every leaf of `nodes` is entered, and each at most once."""
        entries = Counter(serial for _, serial, _ in self._heap)
        if entries != Counter(self._members):
            raise AssertionError(f"heap entries {entries} differ from members {self._members}")
        missing = [n.serial for n in nodes if self._is_leaf(n) and n.serial not in self._members]
        if missing:
            raise AssertionError(f"leaves {missing} were never offered")
