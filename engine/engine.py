"""A worker's engine: the scheduler that decides and the ranks that execute, ready to step."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.capacity import Capacity
from engine.handoff.decode_side import Destination
from engine.handoff.pusher import Pusher
from engine.handoff.room import RoomReport
from engine.host_side import HostCopyError, HostSide
from engine.messages import HostReport, StepDone
from engine.parallel.group import Group
from engine.parallel.mesh import Mesh
from engine.plan import StepPlan, StepResult
from engine.runner import Runner
from engine.scheduler.scheduler import Scheduler
from engine.types import ModelId
from kvcache.events import EventLog
from kvcache.pool import KVPool
from kvcache.transfer.base import TransferEngine
from kvcache.transfer.record import PoolRecord


@dataclass(frozen=True, slots=True)
class Rank:
    """What one process of a group computes with."""

    runner: Runner
    mesh: Mesh
    stream_workspace_bytes: int  # of the streamed reads; 0 with one rank
    pool: KVPool
    pusher: Pusher | None = None  # of a prefill group's ranks
    transfer: TransferEngine | None = None  # of those and of decode workers
    host: HostSide | None = None  # where there is a host tier

    def execute(self, plan: StepPlan) -> StepResult:
        """This rank's part of a step. What the forward raises comes after copies between the tiers
        were begun, rooms opened and closed, and before anything is pushed."""
        if self.host is not None:
            self.host.start(plan.host)
        if self.pusher is not None:
            for room in plan.close_rooms:
                self.pusher.close_room(room)
            for opened in plan.open_rooms:
                self.pusher.open(opened.room, opened.reservation)
        if plan.extends:
            result = self.runner.execute(plan)
        else:
            result = StepResult(step=plan.step, sampled=[])
        if self.pusher is not None:
            for push in plan.pushes:
                self.pusher.push(push.room, push.pages, push.positions, push.is_last)
        return result

    def settle(self) -> None:
        """Until this rank writes nothing more into pages that have been given up. Raises where its
        device does not work any more."""
        self.runner.settle()

    def close(self) -> None:
        """Copies under way end; transfers in flight fail."""
        if self.host is not None:
            self.host.close()
        if self.transfer is not None:
            self.transfer.close()
        if self.pusher is not None:
            self.pusher.close()


class Mailbox:
    """What ranks report beside the steps, on its way to the scheduler: put by any thread, taken by
    the worker's loop."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[RoomReport | HostReport] = queue.SimpleQueue()
        self.on_put: Callable[[], None] | None = None  # wakes who takes

    def put(self, report: RoomReport | HostReport) -> None:
        self._queue.put(report)
        if self.on_put is not None:
            self.on_put()

    def take(self) -> list[RoomReport | HostReport]:
        return [self._queue.get() for _ in range(self._queue.qsize())]


@dataclass(slots=True)
class Engine:
    vocab_size: int
    bytes_per_token: int  # of KV, over all layers
    capacity: Capacity
    model_id: ModelId
    scheduler: Scheduler
    leader: Rank
    group: Group
    mailbox: Mailbox
    events: EventLog  # of the prefix cache
    reports: list[StepDone] = field(default_factory=list)  # of the other ranks, the last step's
    host_reports: dict[int, HostReport] = field(default_factory=dict)  # by rank, the last

    def execute(self, plan: StepPlan) -> StepResult:
        """One step on all ranks. With one rank, what the forward raises ends that step's requests;
        with several, it ends the group: the others may be in a collective that never returns."""
        self.group.begin(plan)
        try:
            result = self.leader.execute(plan)
        except Exception as error:
            if self.group.size > 1:
                self.group.fail_step(plan, error)
            raise
        self.reports = self.group.finish(plan)
        return result

    def report(self, report: RoomReport | HostReport) -> None:
        """Fold in what a rank reports beside the steps. Raises HostCopyError where a copy between
        the tiers has failed: this group must end."""
        if isinstance(report, RoomReport):
            self.scheduler.prefill_side.report(report)
            return
        if report.error:
            raise HostCopyError(f"item {report.item} on rank {report.rank}: {report.error}")
        self.host_reports[report.rank] = report
        self.scheduler.cache.acknowledge(report.item, report.rank)

    @property
    def record(self) -> PoolRecord | None:
        """Of the pool that is handed over from; None where this worker hands nothing over."""
        return self.leader.pool.record() if self.leader.pusher is not None else None

    @property
    def destination(self) -> Destination | None:
        """Where bytes for this worker go; None where it takes none."""
        return destination_of(self.leader, self.model_id)

    def close(self) -> None:
        """End the other ranks."""
        self.group.close()
        self.leader.close()
        self.leader.mesh.close()


def destination_of(rank: Rank, model_id: ModelId) -> Destination | None:
    if rank.transfer is None or rank.pusher is not None:
        return None
    return Destination(rank.transfer.session, rank.pool.record(), model_id)
