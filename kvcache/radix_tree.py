"""A radix tree over token ids whose edges are whole pages.

Owns the nodes, their locks and the order in which leaves may be dropped. Knows no request and
frees no page: it hands the pages of what it drops to its caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcache.allocator import count_lanes
from kvcache.events import EventLog, chain_hashes, token_bytes
from kvcache.radix_node import LeafHeap, Node

__all__ = ["Node", "PageKeys", "RadixTree"]

_FIRST_RUN = 8  # pages encoded at first; runs then double


class PageKeys:
    """The full pages of a prompt as comparable keys: one bytes object a page, 4 bytes a token.

    Keys are made on demand, at most about twice as many as are asked for, so that a lookup costs
    what it matches and not what the prompt is long. Token ids outside [0, 2**32) are a ValueError.
    """

    def __init__(self, token_ids: Sequence[int], page_size: int) -> None:
        self._token_ids = token_ids
        self._page_size = page_size
        self._keys: list[bytes] = []
        self.num_pages = len(token_ids) // page_size

    def slice(self, start: int, stop: int) -> list[bytes]:
        """Keys of pages [start, stop), with stop <= num_pages."""
        if stop > len(self._keys):
            self._encode(min(self.num_pages, max(stop, 2 * len(self._keys), _FIRST_RUN)))
        return self._keys[start:stop]

    def _encode(self, stop: int) -> None:
        tokens = self._token_ids[len(self._keys) * self._page_size : stop * self._page_size]
        data = token_bytes(tokens)
        width = 4 * self._page_size
        self._keys += [data[i : i + width] for i in range(0, len(data), width)]


class RadixTree:
    """Page-granular prefixes with locks and least-recently-used leaves.

    Unlocked leaves wait in a heap by tick, so no operation scans the tree. Where there is a log of
    events, every page has a hash, and what comes and goes is told to it.

    This class moves pages of the device tier only. It keeps what nodes have in the host tier and
    stops its walks there: kvcache.tiered_tree goes on.
    """

    def __init__(self, page_size: int, num_lanes: int = 1, events: EventLog | None = None) -> None:
        self.page_size = page_size
        self.num_lanes = num_lanes
        self.num_pages = 0
        self.num_nodes = 0  # without the root
        self.num_pinned_pages = 0
        self.evictable = [0] * num_lanes  # pages in nodes that are not kept, by lane
        self._clock = 0
        self._next_serial = 0
        self._leaves = LeafHeap(self._is_leaf)
        self._events = events
        # The root's hash stands before the first page's, as a parent's last one does elsewhere.
        self.root = self._new_node(None, [], [], [events.root] if events else [])

    def walk(self, keys: PageKeys, start: Node | None = None) -> tuple[Node, list[int]]:
        """The longest prefix of `keys` that hangs below `start` (None: the root): its last node and
        its pages. Splits that node where the prefix ends inside it, and makes the path recent."""
        node = start or self.root
        pages: list[int] = []
        while len(pages) < keys.num_pages:
            done = len(pages)
            child = node.children.get(keys.slice(done, done + 1)[0])
            if child is None or not child.pages:
                break
            num_same = self._num_same_pages(child, keys, done)
            node = child if num_same == len(child.keys) else self._split(child, num_same)
            pages += node.pages
        self._touch(node)
        return node, pages

    def append(self, parent: Node, keys: list[bytes], pages: list[int]) -> Node:
        """A new leaf below `parent`, which has no child that begins with keys[0]."""
        hashes: list[bytes] = []
        if self._events is not None:
            hashes = chain_hashes(parent.hashes[-1], keys)
            self._events.store(hashes)
        node = self._new_node(parent, keys, pages, hashes)
        parent.children[keys[0]] = node
        parent.num_resident += 1
        self.num_nodes += 1
        self.num_pages += len(pages)
        self._add_evictable(node, 1)
        self._touch(node)
        self._offer(node)
        return node

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it. RuntimeError for a node that was dropped."""
        if node.parent is None and node is not self.root:
            raise RuntimeError("cannot lock a node that was evicted: lock right after the match")
        for step in self.path(node):
            self._add_evictable(step, -1)
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`. RuntimeError where it is not locked."""
        if node is not self.root and node.locks == 0:
            raise RuntimeError("cannot unlock a node that is not locked")
        for step in self.path(node):
            step.locks -= 1
            self._add_evictable(step, 1)
            self._offer(step)

    def pin(self, node: Node) -> None:
        """Count a pin on `node` and all above it. In this tree it keeps nothing: who pins holds a
        lock, too."""
        for step in self.path(node):
            self._add_evictable(step, -1)
            step.pins += 1
            if step.pins == 1:
                self.num_pinned_pages += len(step.keys)
            self._add_evictable(step, 1)

    def unpin(self, node: Node) -> None:
        """Undo one `pin` of `node`. RuntimeError where it is not pinned."""
        if node is not self.root and node.pins == 0:
            raise RuntimeError("cannot unpin a node that is not pinned")
        for step in self.path(node):
            self._add_evictable(step, -1)
            step.pins -= 1
            if step.pins == 0:
                self.num_pinned_pages -= len(step.keys)
            self._add_evictable(step, 1)
            self._offer(step)

    def oldest_leaf(self) -> Node | None:
        """The leaf that was used least recently and is not kept; None where there is none."""
        return self._leaves.oldest()

    def trim(self, leaf: Node, num_pages: int) -> list[int]:
        """Cut the last `num_pages` pages off a leaf that is not kept and return them; the leaf is
        dropped when none is left."""
        self._check_trim(self._is_leaf(leaf), leaf, num_pages)
        first_key = leaf.keys[0]
        pages = leaf.pages[-num_pages:]
        del leaf.pages[-num_pages:]
        del leaf.keys[-num_pages:]
        if self._events is not None:
            self._events.remove(reversed(leaf.hashes[-num_pages:]))
            del leaf.hashes[-num_pages:]
        self.num_pages -= num_pages
        for lane, count in enumerate(count_lanes(pages, self.num_lanes)):
            leaf.lanes[lane] -= count
            self.evictable[lane] -= count
        if not leaf.pages:
            parent, leaf.parent = leaf.parent, None
            assert parent is not None
            del parent.children[first_key]
            parent.num_resident -= 1
            self.num_nodes -= 1
            self._offer(parent)
        return pages

    def path(self, node: Node) -> Iterator[Node]:
        """`node` and its ancestors, without the root."""
        step: Node | None = node
        while step is not None and step is not self.root:
            yield step
            step = step.parent

    def nodes(self) -> Iterator[Node]:
        """Every node below the root, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node is not self.root:
                yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """AssertionError unless spans, links, locks, ticks, counts and heap agree. O(tree)."""
        evictable = [0] * self.num_lanes
        num_nodes = num_pages = num_pinned = 0
        for node in self.nodes():
            num_nodes += 1
            num_pinned += len(node.keys) if node.pins else 0
            num_pages += len(node.pages)
            faults = self._faults(node)
            if faults:
                raise AssertionError(f"node {node.serial} with pages {node.pages}: {faults}")
            if not self._is_kept(node):
                evictable = [a + b for a, b in zip(evictable, node.lanes, strict=True)]
        found = (num_nodes, num_pages, num_pinned, evictable)
        counted = (self.num_nodes, self.num_pages, self.num_pinned_pages, self.evictable)
        if found != counted:
            raise AssertionError(f"(nodes, pages, pinned, evictable) is {found}, counted {counted}")
        self._leaves.check(self.nodes())

    def _faults(self, node: Node) -> list[str]:
        parent = node.parent
        hashes: list[bytes] = []
        if self._events is not None and parent is not None:
            hashes = chain_hashes(parent.hashes[-1], node.keys)
        wrong = {
            "parent link": parent is None or parent.children.get(node.keys[0]) is not node,
            "span": not (node.pages or node.host_pages)
            or any(len(p) not in (0, len(node.keys)) for p in (node.pages, node.host_pages)),
            "residency": bool(node.pages and parent and parent.parent and not parent.pages),
            "resident children": node.num_resident
            != sum(bool(child.pages) for child in node.children.values()),
            "hashes": node.hashes != hashes,
            "lanes": node.lanes != count_lanes(node.pages, self.num_lanes)
            or node.host_lanes != count_lanes(node.host_pages, self.num_lanes),
            "locks": node.locks < sum(child.locks for child in node.children.values()),
            "pins": node.pins < sum(child.pins for child in node.children.values()),
            "tick": parent is not None and parent.tick < node.tick,
        }
        return [name for name, is_wrong in wrong.items() if is_wrong]

    def _num_same_pages(self, child: Node, keys: PageKeys, done: int) -> int:
        """How many of child's pages equal keys[done:]; the first is known to. Runs double, so a
        long node costs no more than the part that matches."""
        stop = min(len(child.keys), keys.num_pages - done)
        same = 1
        while same < stop:
            run = min(stop, 2 * same)
            ours, theirs = keys.slice(done + same, done + run), child.keys[same:run]
            if ours != theirs:
                return same + next(i for i, key in enumerate(ours) if key != theirs[i])
            same = run
        return same

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after `num_pages` pages. The upper part is new and returned; `node` stays the
        lower part, so that whoever locked it still unlocks the same path."""
        parent = node.parent
        assert parent is not None
        upper = self._new_node(
            parent, node.keys[:num_pages], node.pages[:num_pages], node.hashes[:num_pages]
        )
        upper.host_pages = node.host_pages[:num_pages]
        upper.host_lanes = count_lanes(upper.host_pages, self.num_lanes)
        upper.num_resident = int(bool(node.pages))
        upper.locks, upper.hits, upper.tick = node.locks, node.hits, node.tick
        upper.pins = node.pins
        parent.children[upper.keys[0]] = upper
        node.parent = upper
        del node.keys[:num_pages]
        del node.pages[:num_pages]
        del node.host_pages[:num_pages]
        del node.hashes[:num_pages]
        node.lanes = [a - b for a, b in zip(node.lanes, upper.lanes, strict=True)]
        node.host_lanes = [a - b for a, b in zip(node.host_lanes, upper.host_lanes, strict=True)]
        upper.children[node.keys[0]] = node
        self.num_nodes += 1
        return upper

    def _new_node(
        self, parent: Node | None, keys: list[bytes], pages: list[int], hashes: list[bytes]
    ) -> Node:
        lanes = count_lanes(pages, self.num_lanes)
        self._next_serial += 1
        return Node(parent, keys, pages, hashes, lanes, self._next_serial)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        self.root.tick = self._clock
        for step in self.path(node):
            step.tick = self._clock

    def _is_kept(self, node: Node) -> bool:
        """It must not leave the tier that it would leave next."""
        return bool(node.locks)

    def _is_leaf(self, node: Node) -> bool:
        """It may leave the device tier now."""
        is_leaf = bool(node.pages and node.parent) and not node.num_resident
        return is_leaf and not self._is_kept(node)

    def _offer(self, node: Node) -> None:
        """Enter `node` where it can be evicted now."""
        self._leaves.offer(node)

    @staticmethod
    def _check_trim(is_leaf: bool, leaf: Node, num_pages: int) -> None:
        if not is_leaf:
            raise RuntimeError("only an unlocked leaf can be trimmed")
        if not 0 < num_pages <= len(leaf.keys):
            raise ValueError(f"num_pages must be in [1, {len(leaf.keys)}], got {num_pages}")

    def _add_evictable(self, node: Node, sign: int) -> None:
        """Before (-1) and after (1) whatever a node's share in the accounts depends on changes."""
        if self._is_kept(node):
            return
        for lane, count in enumerate(node.lanes):
            self.evictable[lane] += sign * count
