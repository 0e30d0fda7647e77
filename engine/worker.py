"""A worker process: `python -m engine.worker CONFIG_JSON`.

Owns the loop receive -> plan -> execute -> update -> send, and nothing else: the scheduler decides,
the runner computes, the channel carries. A request's failure ends that request; a broken invariant
ends the process, and the launcher starts another.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
from types import FrameType

import msgspec

from engine.channel import WorkerChannel
from engine.config import WorkerConfig
from engine.engine import Engine
from engine.loading import load_engine
from engine.messages import Abort, Drain, Goodbye, Heartbeat, Hello, Outputs, Submit, ToWorker
from engine.metrics import WorkerMetrics
from engine.model.config import ConfigError
from engine.model.weights import WeightError
from engine.plan import StepPlan
from engine.process import BAD_OPTIONS, die_with_parent, set_title
from engine.types import TokenOut

log = logging.getLogger("plait.worker")

HEARTBEAT_S = 0.5


class Worker:
    """One scheduler, one runner, one channel. `run` returns the exit code."""

    def __init__(self, config: WorkerConfig, engine: Engine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._instance_id = uuid.uuid4().hex
        self._channel = WorkerChannel(config.frontend_address, self._instance_id)
        # Held by whoever uses the channel or the scheduler; released only while a step executes,
        # so that the heart beats during a long one.
        self._lock = threading.Lock()
        self._metrics = WorkerMetrics()
        self._is_draining = threading.Event()
        self._last_beat = 0.0
        self._parent = os.getppid()
        self._hello = Hello(
            instance_id=self._instance_id,
            role=config.role,
            pid=os.getpid(),
            model=config.model,
            vocab_size=engine.vocab_size,
            context_length=engine.capacity.context_length,
            page_size=engine.capacity.page_size,
            total_pages=engine.capacity.logical_pages,
        )

    def drain(self) -> None:
        """Finish what is running, refuse what comes, then end. Safe in a signal handler."""
        self._is_draining.set()

    def run(self) -> int:
        heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        with self._lock:
            self._channel.send(self._hello)
            heart.start()
            while self._turn():
                pass
            self._engine.close()
            self._channel.send(Goodbye())
            self._channel.close()
        log.info("worker ends")
        return 0

    def _turn(self) -> bool:
        """One round of the loop; False when the worker is done."""
        idle = self._scheduler.is_idle
        if idle and self._is_draining.is_set():
            return False
        if os.getppid() != self._parent:
            log.error("the front end is gone")
            return False
        for message in self._channel.receive(HEARTBEAT_S if idle else 0.0):
            self._send(self._handle(message))
        plan = self._scheduler.plan()
        if plan is None:
            self._heartbeat_if_due(0.0 if not idle else HEARTBEAT_S)
            return True
        outs = self._step(plan)
        self._send(outs)
        self._heartbeat_if_due(0.0 if self._scheduler.is_idle else HEARTBEAT_S)
        return True

    def _handle(self, message: ToWorker) -> list[TokenOut]:
        match message:
            case Submit(request=request, output_ids=output_ids):
                return self._scheduler.submit(request, output_ids)
            case Abort(rid=rid):
                return self._scheduler.abort(rid)
            case Drain():
                self._is_draining.set()
                return []

    def _step(self, plan: StepPlan) -> list[TokenOut]:
        self._lock.release()
        try:
            result = self._engine.execute(plan)
        except Exception as error:
            log.exception("step %d failed; its %d requests end", plan.step, len(plan.extends))
            result = None
            reason = f"the step failed: {type(error).__name__}: {error}"
        finally:
            self._lock.acquire()
        if result is None:
            return self._scheduler.fail_step(reason)
        self._metrics.observe(result, num_requests=len(plan.extends))
        return self._scheduler.update(plan, result)

    def _send(self, outs: list[TokenOut]) -> None:
        if outs:
            self._channel.send(Outputs(outs))

    def _heartbeat_if_due(self, interval_s: float) -> None:
        now = time.monotonic()
        if now - self._last_beat >= interval_s:
            self._last_beat = now
            load = self._scheduler.load
            families = self._metrics.families(
                self._engine, num_malformed=self._channel.num_malformed
            )
            self._channel.send(Heartbeat(load=load, metrics=families))

    def _beat(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            if self._lock.acquire(blocking=False):  # else the loop is awake and beats itself
                try:
                    self._heartbeat_if_due(HEARTBEAT_S)
                finally:
                    self._lock.release()


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s worker {config.index}: %(message)s",
    )
    die_with_parent(config.parent_pid)
    set_title(f"plait worker {config.index}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the front end, which drains
    try:
        engine = load_engine(config)
    except (ConfigError, WeightError, ValueError) as error:
        log.error("%s", error)
        log.debug("where it was raised", exc_info=error)
        return BAD_OPTIONS
    worker = Worker(config, engine)

    def on_term(signum: int, frame: FrameType | None) -> None:
        worker.drain()

    signal.signal(signal.SIGTERM, on_term)
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
