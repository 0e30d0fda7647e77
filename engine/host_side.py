"""A rank's side of the host tier: starts the copies that a plan orders and reports each, once.

Copies end beside the steps, so threads wait for them and report; a forward waits for nothing but
the layer that it is about to read. Decides nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.messages import HostReport
from kvcache.host_copies import LANES, Copy, Lane
from kvcache.host_plan import HostItem, HostOrders, LoadBack
from kvcache.host_tier import HostTier
from kvcache.pool import KVPool

log = logging.getLogger("plait.host")


class HostCopyError(RuntimeError):
    """Bytes of a prefix did not arrive: what the tree says is no longer true, so the group ends."""


class HostSide:
    """`report` is called from any thread, exactly once for each item that was started, also where
    this rank owns none of its pages; after a copy has failed, with its error."""

    def __init__(
        self, pool: KVPool, num_pages: int, rank: int, report: Callable[[HostReport], None]
    ) -> None:
        self.tier = HostTier(pool, num_pages)
        self._rank = rank
        self._report = report
        self._telling = threading.Lock()
        # One waits for each lane, in which copies end in the order of their starting.
        self._waiters: dict[Lane, ThreadPoolExecutor] = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=f"host-{lane}") for lane in LANES
        }
        pool.before_read = self._wait_layer

    @property
    def wait_s(self) -> float:
        """Time that forwards have waited for load-backs, since the start."""
        return self.tier.wait_s

    def start(self, orders: HostOrders) -> None:
        """Begin a plan's copies. Raises HostCopyError for an item that would cross ranks or that
        cannot be started: the tree counts on its bytes."""
        items: list[HostItem] = [*orders.load_backs, *orders.backups]
        for item in items:
            try:
                copy = self.tier.start(item)
            except Exception as error:
                raise HostCopyError(f"item {item.id} on rank {self._rank}: {error!r}") from error
            if copy is None:
                self._tell(item.id)
            else:
                lane: Lane = "in" if isinstance(item, LoadBack) else "out"
                self._waiters[lane].submit(self._finish, item.id, copy)

    def close(self) -> None:
        """Wait for the copies under way and report them."""
        self.tier.close()
        for waiter in self._waiters.values():
            waiter.shutdown()

    def _wait_layer(self, layer: int) -> None:
        try:
            self.tier.wait_layer(layer)
        except Exception as error:
            raise HostCopyError(f"a load-back on rank {self._rank} failed: {error!r}") from error

    def _finish(self, item_id: int, copy: Copy) -> None:
        try:
            copy.wait()
        except Exception as error:
            self._fail(item_id, error)
        else:
            self._tell(item_id)

    def _fail(self, item_id: int, error: Exception) -> None:
        log.error("a copy failed on rank %d", self._rank, exc_info=error)
        self._report(HostReport(rank=self._rank, item=item_id, error=repr(error)))

    def _tell(self, item_id: int) -> None:
        """Report what has ended by now: item `item_id`, unless another call has reported it."""
        with self._telling:
            try:
                done = self.tier.poll()
            except Exception as error:
                self._fail(item_id, error)
                return
            for item in done:
                report = HostReport(
                    rank=self._rank,
                    item=item,
                    num_bytes=dict(self.tier.num_bytes),
                    seconds=dict(self.tier.seconds),
                )
                self._report(report)
