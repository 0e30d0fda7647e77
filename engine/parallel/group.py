"""The leader's hold on the other ranks of its group: their processes, their plans, their reports.

The leader alone decides. A rank that dies, fails or falls silent takes the group down, loudly and
within seconds: collectives that lost a member cannot be finished, and the launcher starts another
group. Knows no requests and no tensors.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from engine.config import RankConfig, WorkerConfig
from engine.handoff.room import RoomReport
from engine.messages import (
    HostReport,
    RankBeat,
    RankFailed,
    RankReady,
    RunStep,
    Setup,
    StepDone,
    Stop,
    ToLeader,
    ToRank,
)
from engine.pipe import Pipe, plans_pipe, reports_pipe
from engine.plan import StepPlan
from engine.private_folder import PrivateFolder
from engine.process import BAD_OPTIONS

log = logging.getLogger("plait.group")

GROUP_FAILED = 3  # exit code of a leader whose group has lost a rank
# A rank that has said nothing in three looks of two seconds is lost. Looks are counted, not time,
# so a leader that was itself held up loses nobody.
LOOK_S = 2.0
MAX_SILENT_LOOKS = 3
MAX_START_LOOKS = 300  # until a rank is ready: ten minutes
_POLL_S = 0.1
_CAUSE_S = 2.0
_MAX_BASE_BYTES = 70


class Group:
    """Ranks 1 .. cp_size - 1 of a worker; with one rank, nobody. `setup` after the leader has
    settled the capacity, then `begin` and `finish` around each of the leader's own steps."""

    def __init__(
        self, config: WorkerConfig, on_report: Callable[[RoomReport | HostReport], None]
    ) -> None:
        self.size = config.cp_size
        self._on_report = on_report  # called from the thread that reads reports
        self._is_closing = False
        self._failing = threading.Lock()
        self._done: queue.SimpleQueue[RankReady | StepDone] = queue.SimpleQueue()
        self._silent_looks: dict[int, int] = dict.fromkeys(range(1, self.size), 0)
        self._is_ready: set[int] = set()
        self._plans: list[Pipe[ToRank]] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._private = _private_folder(config) if self.size > 1 else None
        self._folder = self._private.path if self._private is not None else None
        try:
            self._start(config)
        except BaseException:
            self.kill()
            raise

    @property
    def store_file(self) -> str:
        """Where the ranks meet to set up their collectives."""
        return f"{self._folder}/store"

    def _start(self, config: WorkerConfig) -> None:
        reports = f"ipc://{self._folder}/reports"
        for rank in range(1, self.size):
            address = f"ipc://{self._folder}/plans-{rank}"
            self._plans.append(plans_pipe(address, is_leader=True))
            rank_config = RankConfig(
                worker=config,
                rank=rank,
                plans_address=address,
                reports_address=reports,
                leader_pid=os.getpid(),
            )
            self._processes[rank] = _spawn(rank_config)
        if self._processes:
            watch = threading.Thread(target=self._watch, args=(reports,), daemon=True)
            watch.start()

    def setup(self, message: Setup) -> None:
        """Tell all ranks what was settled; they join the collectives from here on."""
        self._send(message)

    def wait_ready(self) -> None:
        """Until every rank has reported that it is ready for plans."""
        for _ in self._processes:
            self._done.get()

    def begin(self, plan: StepPlan) -> None:
        self._send(RunStep(plan))

    def finish(self, plan: StepPlan) -> list[StepDone]:
        """Every other rank's report of this step."""
        reports = [self._done.get() for _ in self._processes]
        done = [r for r in reports if isinstance(r, StepDone) and r.step == plan.step]
        if len({r.rank for r in done}) != len(self._processes):
            self.fail(f"step {plan.step}: the ranks reported {reports}")
        return done

    def kill(self) -> None:
        """End the ranks at once: the leader does not start."""
        self._is_closing = True
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._remove_folder()

    def close(self) -> None:
        """End the ranks and wait for them."""
        self._is_closing = True
        self._send(Stop())
        for process in self._processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in self._plans:
            pipe.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._private is not None:
            self._private.remove()

    def fail_step(self, plan: StepPlan, error: Exception) -> NoReturn:
        """The leader's own part of a step failed. Where that was because another rank is gone, the
        collective tells first, and a moment later the system tells which."""
        deadline = time.monotonic() + _CAUSE_S
        while time.monotonic() < deadline:
            for rank, process in self._processes.items():
                code = process.poll()
                if code is not None:
                    self.fail(_ending(rank, process.pid, code), _exit_code(code))
            time.sleep(_POLL_S)
        self.fail(f"rank 0 failed: step {plan.step}: {error!r}")

    def fail(self, reason: str, exit_code: int = GROUP_FAILED) -> NoReturn:
        """End the whole group now. Callable from any thread: the main one may be in a collective
        that will never return."""
        self._failing.acquire()  # the first reason is the cause; another thread waits for the end
        log.critical("the group of %d ranks ends: %s", self.size, reason)
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._remove_folder()
        logging.shutdown()
        os._exit(exit_code)

    def _send(self, message: Setup | RunStep | Stop) -> None:
        if self._plans:
            frame = self._plans[0].encode(message)
            for pipe in self._plans:
                pipe.send(frame)

    def _watch(self, address: str) -> None:
        """The thread that reads reports and notices losses, whatever the main thread does."""
        pipe = reports_pipe(address, is_leader=True)
        next_look = time.monotonic() + LOOK_S
        while not self._is_closing:
            timeout_s = _POLL_S
            while (report := pipe.receive(timeout_s)) is not None:
                self._take(report)
                timeout_s = 0.0  # all that is there, before anyone is judged
            for rank, process in self._processes.items():
                code = process.poll()
                if code is not None and not self._is_closing:
                    self.fail(_ending(rank, process.pid, code), _exit_code(code))
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_S
                self._look()
        pipe.close()

    def _look(self) -> None:
        for rank in self._silent_looks:
            self._silent_looks[rank] += 1
            is_ready = rank in self._is_ready
            most = MAX_SILENT_LOOKS if is_ready else MAX_START_LOOKS
            if self._silent_looks[rank] > most and not self._is_closing:
                what = "said nothing" if is_ready else "not become ready"
                self.fail(f"rank {rank} has {what} for {most * LOOK_S:.0f} s")

    def _take(self, report: ToLeader) -> None:
        if isinstance(report, RankReady):
            self._is_ready.add(report.rank)
        # Until a rank is ready its beats do not count: compiling kernels keeps its threads waiting.
        if report.rank in self._is_ready:
            self._silent_looks[report.rank] = 0
        match report:
            case RankFailed(rank=rank, error=error):
                self.fail(f"rank {rank} failed: {error}")
            case RankReady() | StepDone():
                self._done.put(report)
            case RoomReport() | HostReport():
                self._on_report(report)
            case RankBeat():
                pass


def _private_folder(config: WorkerConfig) -> PrivateFolder:
    """A folder for the group's sockets that only this user can enter: beside the worker's own
    where that is a file, so that it goes with it. Socket paths are limited to some 100 bytes."""
    base = Path(tempfile.gettempdir())
    if config.listen_address.startswith("ipc://"):
        base = Path(config.listen_address.removeprefix("ipc://")).parent
    return PrivateFolder(base, "group-", max_base_bytes=_MAX_BASE_BYTES)


def _spawn(config: RankConfig) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "engine.parallel.rank", msgspec.json.encode(config).decode()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _ending(rank: int, pid: int, code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} (pid {pid}) {how}"


def _exit_code(code: int) -> int:
    return BAD_OPTIONS if code == BAD_OPTIONS else GROUP_FAILED
