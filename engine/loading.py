"""From a WorkerConfig to an engine that is ready to step: model, pool, scheduler, runner."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engine.capacity import Capacity
from engine.model.base import Model
from engine.runner import Runner
from engine.scheduler.scheduler import Scheduler

log = logging.getLogger("plait.loading")


@dataclass(frozen=True, slots=True)
class Engine:
    model: Model
    capacity: Capacity
    scheduler: Scheduler
    runner: Runner
