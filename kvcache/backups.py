"""What is backed up to the host tier, and when: the write policies, and prefixes that are pinned.

Owns which nodes are due, and the locks of those that are pinned and not backed up yet.
"""

from __future__ import annotations

from collections import Counter
from typing import get_args

from kvcache.copies_under_way import CopiesUnderWay
from kvcache.host_pages import HostPages
from kvcache.host_plan import WritePolicy
from kvcache.radix_tree import Node
from kvcache.tiered_tree import TieredTree

_SELECTIVE_HITS = 2


class Backups:
    """Policies: `write_through` backs up what is inserted; `write_through_selective` what was used
    twice; `write_back` what is about to be evicted from the device, which is the cache's to say. A
    node that cannot be backed up, as its lanes of the host tier are full of what may not leave,
    stays on the device only.

    `counts`, cumulative: `backups_started`, `backups_skipped_no_host_pages`."""

    def __init__(
        self,
        tree: TieredTree,
        host: HostPages,
        under_way: CopiesUnderWay,
        policy: WritePolicy,
        counts: Counter[str],
    ) -> None:
        if policy not in get_args(WritePolicy):
            raise ValueError(
                f"--hicache-write-policy {policy}: accepted are {', '.join(get_args(WritePolicy))}"
            )
        self._tree = tree
        self._host = host
        self._under_way = under_way
        self._counts = counts
        self.policy: WritePolicy = policy
        self._due: dict[Node, None] = {}  # in order
        self._held: dict[Node, None] = {}  # pinned, and locked until the host has them

    # -- what makes a node due

    def inserted(self, node: Node) -> None:
        """The path to `node` is on the device."""
        if self.policy == "write_through":
            for step in self._tree.path(node):
                if step.host_pages:
                    break
                self._due[step] = None

    def used(self, node: Node) -> None:
        """A request starts from the path to `node`. It gives what could not be backed up before
        another chance."""
        needed = {"write_through": 1, "write_through_selective": _SELECTIVE_HITS}.get(self.policy)
        for step in self._tree.path(node):
            step.hits += 1
            if needed is not None and step.hits >= needed and not step.host_pages:
                self._due[step] = None

    def hold(self, node: Node) -> None:
        """`node` is pinned: whatever the policy, the host is to have it, the device until then."""
        if not self._is_backed_up(node):
            self._due |= {step: None for step in self._tree.path(node) if not step.host_pages}
            self._held[node] = None
            self._tree.lock(node)

    def let_go(self, node: Node) -> None:
        """Undo `hold`."""
        if node in self._held:
            del self._held[node]
            self._tree.unlock(node)

    # -- backed up

    def start_due(self) -> None:
        """Make the items of all that is due."""
        due, self._due = self._due, {}
        for node in due:
            self._back_up_path(node)
        if due:
            for node in [node for node in self._held if self._is_backed_up(node)]:
                self.let_go(node)

    def start(self, node: Node) -> bool:
        """Make the item of one node. False where the host has no room in the lanes it needs."""
        host_pages = self._host.alloc_beside(node.pages)
        if host_pages is None:
            self._counts["backups_skipped_no_host_pages"] += 1
            return False
        self._tree.set_host(node, host_pages)
        self._tree.lock(node)
        self._under_way.back_up(node)
        self._counts["backups_started"] += 1
        return True

    def forget(self) -> None:
        """Nothing is due any more."""
        self._due.clear()

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
            if not self.start(step):
                break

    def _is_backed_up(self, node: Node) -> bool:
        """All of its path is in the host tier, or on the way there."""
        return all(step.host_pages for step in self._tree.path(node))
