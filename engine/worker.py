"""A worker, and `main` of its process.

Owns the loop receive -> plan -> execute -> update -> send, and nothing else: the scheduler decides,
the ranks compute, the channel carries. A request's failure ends that request; a broken invariant
ends the process, and the launcher starts another.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from types import FrameType

import msgspec

from engine.channel import Channel
from engine.cluster_key import ClusterKey, ClusterKeyError
from engine.config import WorkerConfig
from engine.engine import Engine
from engine.handoff.room import RoomReport
from engine.health import HealthServer, Vitals
from engine.host_side import HostCopyError
from engine.inbox import HEARTBEAT_S, Inbox
from engine.loading import load_engine
from engine.messages import Alive, Goodbye, Heartbeat, Hello, HostReport
from engine.metrics.worker import WorkerMetrics
from engine.model.config import ConfigError
from engine.model.weights import WeightError
from engine.peers import LOOK_S
from engine.plan import StepPlan
from engine.process import BAD_OPTIONS, die_with_parent, leave, set_title
from engine.stopwatch import Stopwatch
from engine.tracing import NO_TRACER, Tracer, open_tracer
from engine.types import Load, TokenOut
from kvcache.transfer.base import TransferError, TransferUnavailableError

log = logging.getLogger("plait.worker")

UNWIND_S = 2.0  # for a process that is to end while it loads


class Worker:
    """One engine, one channel, one inbox. `run` returns the exit code."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        channel: Channel,
        tracer: Tracer = NO_TRACER,
        vitals: Vitals | None = None,
    ) -> None:
        self._config = config
        self._vitals = Vitals(config.role) if vitals is None else vitals
        self._engine = engine
        self._scheduler = engine.scheduler
        self._channel = channel
        # Held by whoever uses the channel or the scheduler; released only while a step executes,
        # so that the heart beats during a long one, and what was handed over need not wait for it.
        self._lock = threading.Lock()
        self._reported = threading.Semaphore(0)
        self._reports: list[RoomReport | HostReport] = []  # for the loop: they may concern the step
        self._metrics = WorkerMetrics(config.role)
        stopwatch = Stopwatch(self._metrics.observe_stage, tracer)
        self._inbox = Inbox(channel, engine, self._hello(), stopwatch)
        self._drain_asked = threading.Event()
        self._drain_ends_s: float | None = None
        self._waits = False  # the last plan was empty: only a message or a report changes that
        self._has_ended = False  # the channel is closed
        self._last_beat = 0.0
        self._next_look = time.monotonic() + LOOK_S
        self._parent = os.getppid() if config.parent_pid is not None else None
        engine.mailbox.on_put = self._on_report

    def _hello(self) -> Hello:
        capacity = self._engine.capacity
        return Hello(
            instance_id=self._channel.name,
            role=self._config.role,
            pid=os.getpid(),
            host=socket.gethostname(),
            model=self._config.model,
            vocab_size=self._engine.vocab_size,
            context_length=capacity.context_length,
            page_size=capacity.page_size,
            total_pages=capacity.logical_pages,
            model_id=self._engine.model_id,
            cp_size=self._config.cp_size,
            hash_salt=self._config.hash_salt,
        )

    def drain(self) -> None:
        """Finish what is running, refuse what comes, then end. Safe in a signal handler."""
        self._drain_asked.set()

    def run(self) -> int:
        heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        hands = threading.Thread(target=self._hand_over, name="hand-over", daemon=True)
        with self._lock:
            heart.start()
            hands.start()
            self._vitals.turned()
            self._vitals.state = "ready"
            log.info("ready at %s", self._channel.address)
            while self._turn():
                pass
            self._engine.close()
            self._inbox.tell_frontends(Goodbye())
            self._channel.close()
            self._has_ended = True
            self._reported.release()
        log.info("worker ends")
        return 0

    def _turn(self) -> bool:
        """One round of the loop; False when the worker is done."""
        self._vitals.turned()
        if self._drain_asked.is_set() or self._inbox.is_draining:
            self._drain()
            if self._scheduler.is_idle:
                return False
        if self._parent is not None and os.getppid() != self._parent:
            log.error("the process that started this worker is gone")
            return False
        for peer, message in self._channel.receive(HEARTBEAT_S if self._waits else 0.0):
            self._inbox.take(peer, message)
        reports, self._reports = self._reports, []
        for report in (*reports, *self._engine.mailbox.take()):
            self._engine.report(report)
        self._look_if_due()
        was_idle = self._scheduler.is_idle
        plan = self._scheduler.plan()
        self._waits = plan is None
        if self._scheduler.notes and self._config.role == "decode":
            self._engine.leader.settle()  # others write into the pages of a reservation
        self._inbox.send_notes()  # before the step: a reservation need not wait for it
        if plan is not None:
            self._inbox.send(self._step(plan))
            self._inbox.send_notes()
        self._inbox.tell_events()
        falls_idle = self._scheduler.is_idle and not (was_idle and plan is None)
        self._heartbeat_if_due(0.0 if falls_idle else HEARTBEAT_S)
        return True

    def _drain(self) -> None:
        now = time.monotonic()
        if self._drain_ends_s is None:
            self._inbox.is_draining = True
            self._vitals.state = "draining"
            self._drain_ends_s = now + self._config.drain_timeout_s
            self._heartbeat_if_due(0.0)
        elif now >= self._drain_ends_s:
            self._scheduler.hand_back_all("the worker is shutting down")
            self._inbox.send_notes()

    def _look_if_due(self) -> None:
        """After what has come was read: who has fallen silent."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._inbox.look()

    def _step(self, plan: StepPlan) -> list[TokenOut]:
        self._lock.release()
        try:
            result = self._engine.execute(plan)
        except HostCopyError:  # cached pages no longer hold what the scheduler takes them for
            raise
        except Exception as error:
            log.exception("step %d failed; its %d requests end", plan.step, len(plan.extends))
            self._engine.leader.settle()  # raises where no later step can succeed: the worker ends
            result = None
            reason = f"the step failed: {type(error).__name__}: {error}"
        finally:
            self._lock.acquire()
        if result is None:
            return self._scheduler.fail_step(reason)
        if plan.extends:
            self._metrics.observe(result, num_requests=len(plan.extends))
        return self._scheduler.update(plan, result)

    def _heartbeat_if_due(self, interval_s: float) -> None:
        now = time.monotonic()
        if now - self._last_beat < interval_s:
            return
        self._last_beat = now
        load: Load = msgspec.structs.replace(
            self._scheduler.load, is_draining=self._inbox.is_draining
        )
        families = self._metrics.families(
            self._engine,
            num_malformed=self._channel.num_malformed,
            refused={**self._inbox.refused, "connection": self._channel.num_refused},
        )
        self._vitals.load, self._vitals.families = load, families
        self._inbox.tell_frontends(Heartbeat(load=load, metrics=families))
        self._inbox.tell_workers(Alive())
        self._channel.alive()
        self._inbox.forget_owners()

    def _on_report(self) -> None:
        """A rank has reported something beside the steps; called in any thread."""
        self._channel.wake()
        self._reported.release()

    def _hand_over(self) -> None:
        """Complete hand-offs while a step executes; between steps the loop is faster."""
        while True:
            self._reported.acquire()
            with self._lock:
                if self._has_ended:
                    return
                for report in self._engine.mailbox.take():
                    rooms = self._scheduler.prefill_side
                    if not (isinstance(report, RoomReport) and rooms.report_in_step(report)):
                        self._reports.append(report)
                self._inbox.send_notes()

    def _beat(self) -> None:
        while not self._has_ended:
            time.sleep(HEARTBEAT_S)
            if self._lock.acquire(blocking=False):  # else the loop is awake and beats itself
                try:
                    if not self._has_ended:
                        self._heartbeat_if_due(HEARTBEAT_S)
                finally:
                    self._lock.release()


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {config.title}: %(message)s",
    )
    if config.parent_pid is not None:
        die_with_parent(config.parent_pid)
    set_title(f"plait {config.title} rank 0" if config.cp_size > 1 else f"plait {config.title}")
    if config.parent_pid is not None:  # Ctrl-C reaches the front end, which drains
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    vitals = Vitals(config.role)
    health: HealthServer | None = None
    _end_where_it_loads()
    try:
        if config.health_address is not None:  # answers while the model is loaded
            health = HealthServer(config.health_address, vitals)
        key = ClusterKey.read(Path(config.cluster_key_file)) if config.cluster_key_file else None
        channel = Channel("worker", uuid.uuid4().hex, bind=config.listen_address, key=key)
        engine = load_engine(config)
    except (
        ClusterKeyError,
        ConfigError,
        OSError,
        TransferError,
        TransferUnavailableError,
        ValueError,
        WeightError,
    ) as error:
        log.error("%s", error)
        log.debug("where it was raised", exc_info=error)
        return BAD_OPTIONS
    tracer = open_tracer(config.traces_url, service=f"plait-{config.role}", instance=channel.name)
    worker = Worker(config, engine, channel, tracer, vitals)

    def on_term(signum: int, frame: FrameType | None) -> None:
        worker.drain()

    signal.signal(signal.SIGTERM, on_term)
    if config.parent_pid is None:
        signal.signal(signal.SIGINT, on_term)
    code = worker.run()
    if health is not None:
        health.close()
    tracer.close()
    return code


def _end_where_it_loads() -> None:
    """Have SIGTERM end this process with code 0 from here on."""

    def end(signum: int, frame: FrameType | None) -> None:
        log.info("ends before it was ready")
        # Where it comes in a call-back that swallows exceptions, as compilers have, `exit` is lost.
        last = threading.Timer(UNWIND_S, os._exit, (0,))
        last.daemon = True
        last.start()
        leave(0)

    signal.signal(signal.SIGTERM, end)
