"""The radix tree over two tiers: spans lie in device memory, in host memory or in both.

Owns how spans change tiers and the order in which they leave the host tier. Moves page numbers, no
bytes: that a copy has ended is its owner's to know, who locks a node until then.

    device only --set_host--> device + host --trim--> host only --trim_host--> gone
                                     ^--give_pages, append--'
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.allocator import count_lanes
from kvcache.events import EventLog
from kvcache.radix_node import LeafHeap, Node
from kvcache.radix_tree import PageKeys, RadixTree


class TieredTree(RadixTree):
    """What `trim` takes from the device stays in the tree where the host has it too. A span that
    only the device had takes all below it along: without it they can never be used again."""

    def __init__(self, page_size: int, num_lanes: int = 1, events: EventLog | None = None) -> None:
        self.num_host_pages = 0
        self.host_evictable = [0] * num_lanes  # host pages in unlocked host-only nodes, by lane
        self._dropped: list[int] = []  # host pages of nodes dropped with their parent
        self._host_leaves = LeafHeap(self._is_host_leaf)
        super().__init__(page_size, num_lanes, events)

    def walk_host(self, keys: PageKeys, start: Node, num_done: int) -> list[Node]:
        """The host-only nodes below `start`, from above, that go on with keys[num_done:]; `start`
        is where `walk` ended. Splits the last where the prefix ends inside it, and makes the path
        recent."""
        nodes: list[Node] = []
        node = start
        while num_done < keys.num_pages:
            child = node.children.get(keys.slice(num_done, num_done + 1)[0])
            if child is None:
                break
            num_same = self._num_same_pages(child, keys, num_done)
            node = child if num_same == len(child.keys) else self._split(child, num_same)
            nodes.append(node)
            num_done += num_same
        if nodes:
            self._touch(node)
        return nodes

    def append(self, parent: Node, keys: list[bytes], pages: list[int]) -> Node:
        """As RadixTree.append; but where host-only nodes hang there with the same keys, those get
        the pages, and only the rest is new."""
        node, done = parent, 0
        while done < len(keys) and (child := node.children.get(keys[done])) is not None:
            num_same = _num_equal(child.keys, keys, done)
            node = child if num_same == len(child.keys) else self._split(child, num_same)
            self.give_pages(node, pages[done : done + num_same])
            done += num_same
        if done < len(keys):
            return super().append(node, keys[done:], pages[done:])
        self._touch(node)
        return node

    def give_pages(self, node: Node, pages: list[int]) -> None:
        """Bring a host-only node below one on the device there too; pages [num_pages]."""
        parent = node.parent
        if parent is None or node.pages or not (parent.pages or parent is self.root):
            raise RuntimeError("only a host-only node below one on the device can get pages")
        if len(pages) != len(node.keys):
            raise ValueError(f"{len(node.keys)} pages are needed, got {len(pages)}")
        self._add_evictable(node, -1)
        node.pages, node.lanes = list(pages), count_lanes(pages, self.num_lanes)
        parent.num_resident += 1
        self.num_pages += len(pages)
        self._add_evictable(node, 1)
        self._offer(node)

    def set_host(self, node: Node, host_pages: list[int]) -> None:
        """A device-only node gets its host pages [num_pages]."""
        if not node.pages or node.host_pages:
            raise RuntimeError("only a device-only node can get host pages")
        if len(host_pages) != len(node.keys):
            raise ValueError(f"{len(node.keys)} host pages are needed, got {len(host_pages)}")
        node.host_pages = list(host_pages)
        node.host_lanes = count_lanes(host_pages, self.num_lanes)
        self.num_host_pages += len(host_pages)

    def trim(self, leaf: Node, num_pages: int) -> list[int]:
        """Take the last `num_pages` device pages off a leaf that is not kept and return them.
        Without host pages that part is dropped, with all below it: see `take_dropped`."""
        self._check_trim(self._is_leaf(leaf), leaf, num_pages)
        if leaf.host_pages:
            return self._demote(leaf, num_pages)
        for child in list(leaf.children.values()):
            self._drop_host_only(child)
        leaf.children.clear()
        return super().trim(leaf, num_pages)

    def oldest_host_leaf(self) -> Node | None:
        """The host-only leaf that was used least recently and is not kept; None where there is
        none."""
        return self._host_leaves.oldest()

    def trim_host(self, leaf: Node, num_pages: int) -> list[int]:
        """Cut the last `num_pages` pages off a host-only leaf that is not kept and return them; the
        leaf is dropped when none is left."""
        self._check_trim(self._is_host_leaf(leaf), leaf, num_pages)
        first_key, parent = leaf.keys[0], leaf.parent
        host_pages = leaf.host_pages[-num_pages:]
        self._add_evictable(leaf, -1)
        if self._events is not None:
            self._events.remove(reversed(leaf.hashes[-num_pages:]))
        del leaf.keys[-num_pages:], leaf.host_pages[-num_pages:], leaf.hashes[-num_pages:]
        leaf.host_lanes = count_lanes(leaf.host_pages, self.num_lanes)
        self._add_evictable(leaf, 1)
        self.num_host_pages -= num_pages
        if not leaf.keys and parent is not None:
            leaf.parent = None
            del parent.children[first_key]
            self.num_nodes -= 1
            self._offer(parent)
        return host_pages

    def take_dropped(self) -> list[int]:
        """Host pages that `trim` has dropped since the last call: the caller's to free."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check(self) -> None:
        super().check()
        host_evictable = [0] * self.num_lanes
        num_host_pages = 0
        for node in self.nodes():
            num_host_pages += len(node.host_pages)
            if not (node.pages or self._is_kept(node)):
                pairs = zip(host_evictable, node.host_lanes, strict=True)
                host_evictable = [a + b for a, b in pairs]
        found = (num_host_pages, host_evictable)
        if found != (self.num_host_pages, self.host_evictable):
            raise AssertionError(
                f"(host pages, evictable) is {found}, counted "
                f"{(self.num_host_pages, self.host_evictable)}"
            )
        self._host_leaves.check(self.nodes())

    def _demote(self, leaf: Node, num_pages: int) -> list[int]:
        """The last pages of a node that the host has too become host-only."""
        if num_pages < len(leaf.keys):
            below = next(iter(leaf.children.values())) if len(leaf.children) == 1 else None
            # Cut there before: no chain of one-page nodes. One that is pinned more often than what
            # is below it cannot give that a part of itself.
            if below is not None and below.pins == leaf.pins:
                return self._move_tail(leaf, below, num_pages)
            self._split(leaf, len(leaf.keys) - num_pages)  # `leaf` is the lower part now
        parent, pages = leaf.parent, leaf.pages
        assert parent is not None
        self._add_evictable(leaf, -1)
        leaf.pages, leaf.lanes = [], [0] * self.num_lanes
        self._add_evictable(leaf, 1)
        parent.num_resident -= 1
        self.num_pages -= num_pages
        self._offer(leaf)
        self._offer(parent)
        return pages

    def _move_tail(self, leaf: Node, child: Node, num_pages: int) -> list[int]:
        """`leaf` loses its last pages; its only child, host-only, begins with them."""
        self._add_evictable(leaf, -1)
        self._add_evictable(child, -1)
        pages = leaf.pages[-num_pages:]
        del leaf.children[child.keys[0]]
        child.keys[:0] = leaf.keys[-num_pages:]
        child.host_pages[:0] = leaf.host_pages[-num_pages:]
        child.hashes[:0] = leaf.hashes[-num_pages:]
        leaf.children[child.keys[0]] = child
        for part in (leaf.keys, leaf.pages, leaf.host_pages, leaf.hashes):
            del part[-num_pages:]
        self.num_pages -= num_pages
        leaf.lanes = count_lanes(leaf.pages, self.num_lanes)
        for node in (leaf, child):
            node.host_lanes = count_lanes(node.host_pages, self.num_lanes)
            self._add_evictable(node, 1)
        return pages

    def _drop_host_only(self, top: Node) -> None:
        """Forget `top` and all below it; the caller takes `top` out of its parent's children."""
        nodes = [top]
        for node in nodes:
            nodes.extend(node.children.values())
        for node in reversed(nodes):  # children first
            self._add_evictable(node, -1)
            if self._events is not None:
                self._events.remove(reversed(node.hashes))
            self._dropped += node.host_pages
            self.num_host_pages -= len(node.host_pages)
            self.num_nodes -= 1
            node.parent = None
            node.children.clear()

    def _is_kept(self, node: Node) -> bool:
        """A pinned node may leave the device, where it is not locked: it is not lost with that."""
        return bool(node.locks or (node.pins and not node.pages))

    def _is_host_leaf(self, node: Node) -> bool:
        """It may leave the host tier, and the tree, now."""
        is_leaf = not (node.pages or node.children) and node.parent is not None
        return is_leaf and not self._is_kept(node)

    def _offer(self, node: Node) -> None:
        super()._offer(node)
        self._host_leaves.offer(node)

    def _add_evictable(self, node: Node, sign: int) -> None:
        if node.pages:
            super()._add_evictable(node, sign)
            return
        if self._is_kept(node):
            return
        for lane, count in enumerate(node.host_lanes):
            self.host_evictable[lane] += sign * count


def _num_equal(ours: Sequence[bytes], theirs: Sequence[bytes], start: int) -> int:
    """How many of ours equal theirs[start:], from the first on."""
    most = min(len(ours), len(theirs) - start)
    return next((i for i in range(most) if ours[i] != theirs[start + i]), most)
