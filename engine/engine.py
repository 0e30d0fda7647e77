"""A worker's engine: the scheduler that decides and the ranks that execute, ready to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.capacity import Capacity
from engine.messages import StepDone
from engine.parallel.group import Group
from engine.parallel.mesh import Mesh
from engine.plan import StepPlan, StepResult
from engine.runner import Runner
from engine.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Rank:
    """What one process of a group computes with."""

    runner: Runner
    mesh: Mesh
    stream_workspace_bytes: int  # of the streamed reads; 0 with one rank


@dataclass(slots=True)
class Engine:
    vocab_size: int
    bytes_per_token: int  # of KV, over all layers
    capacity: Capacity
    scheduler: Scheduler
    leader: Rank
    group: Group
    reports: list[StepDone] = field(default_factory=list)  # of the other ranks, the last step's

    def execute(self, plan: StepPlan) -> StepResult:
        """One step on all ranks. With one rank, what the forward raises ends that step's requests;
        with several, it ends the group: the others may be in a collective that never returns."""
        self.group.begin(plan)
        try:
            result = self.leader.runner.execute(plan)
        except Exception as error:
            if self.group.size > 1:
                self.group.fail_step(plan, error)
            raise
        self.reports = self.group.finish(plan)
        return result

    def close(self) -> None:
        """End the other ranks."""
        self.group.close()
        self.leader.mesh.close()
