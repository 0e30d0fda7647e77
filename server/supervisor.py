"""One worker process kept alive: spawned, watched, killed where it hangs, restarted, ended.

Owns the process and the pace of restarts. Knows no request: the client learns of a death by the
connection that breaks, after all that was said over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import engine
from engine.config import WorkerConfig
from engine.process import BAD_OPTIONS

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # deaths in a row before a hello: a restart will not help
FIRST_DELAY_S = 0.25
MAX_DELAY_S = 30.0
LONG_LIFE_S = 60.0  # a worker that lived so long is restarted without the earlier deaths' delay
POLL_S = 0.05
# A worker speaks twice a second, also during a long step: one that is silent for three looks in a
# row hangs. Looks are counted, not time, so a front end that was itself held up kills nobody.
LOOK_S = 2.0
MAX_SILENT_LOOKS = 3
KILL_AFTER_S = 10.0  # a busy machine may be in the middle of a long step
# Read when a worker's libraries are loaded, so it cannot set them itself. An idle thread that spins
# as long as libgomp likes makes a step ten times slower where another process wants its core; huge
# pages save a tenth of the time that reading the weights takes. What the user sets comes first.
WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "THP_MEM_ALLOC_ENABLE": "1"}
# Workers run here, so that no folder named `engine` where the user stands is taken for ours.
PACKAGE_ROOT = Path(str(engine.__file__)).parent.parent


class WorkerFailedError(Exception):
    """A worker cannot be brought up; its own error is on stderr, above this one."""


def worker_command(config: WorkerConfig) -> list[str]:
    return [sys.executable, "-m", "engine", msgspec.json.encode(config).decode()]


class Supervisor:
    """`run` until cancelled or failed; `stop` ends the worker, `kill` ends it at once. `num_heard`:
    how often the process of that id was heard since its hello; None before it, or once it has left.

    To be used on the main thread's event loop: a worker dies with the thread that spawned it.
    """

    def __init__(
        self,
        config: WorkerConfig,
        num_heard: Callable[[int], int | None],
        *,
        command: Callable[[WorkerConfig], list[str]] = worker_command,
        first_delay_s: float = FIRST_DELAY_S,
        look_s: float = LOOK_S,
    ) -> None:
        self._config = config
        self._num_heard = num_heard
        self._command = command
        self._first_delay_s = first_delay_s
        self._look_s = look_s
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.ready = asyncio.Event()  # set at the first hello
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Keep one worker alive until `stop`. Raises WorkerFailedError when it will not come up."""
        num_failed_starts = 0
        delay_s = self._first_delay_s
        while True:
            started_s = time.monotonic()
            process = await self._spawn()
            was_ready = await self._watch(process)
            if self._stopping.is_set():
                return
            num_failed_starts = 0 if was_ready else num_failed_starts + 1
            self._give_up_where_hopeless(process, num_failed_starts)
            if time.monotonic() - started_s >= LONG_LIFE_S:
                delay_s = self._first_delay_s
            log.error(
                "%s (pid %d) ended with %s; restart in %.2f s",
                self._config.title,
                process.pid,
                _ending(process.returncode),
                delay_s,
            )
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)
            if self._stopping.is_set():
                return
            self.num_restarts += 1

    async def stop(self) -> None:
        """Ask the worker to end, wait, kill it where it does not. No restart follows."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), KILL_AFTER_S)
        except asyncio.TimeoutError:
            log.warning("%s does not end; killed", self._config.title)
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End the worker now."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _spawn(self) -> asyncio.subprocess.Process:
        # Its own session: a terminal's Ctrl-C reaches the front end only, which drains first.
        self._process = await asyncio.create_subprocess_exec(
            *self._command(self._config),
            stdin=subprocess.DEVNULL,
            cwd=PACKAGE_ROOT,
            env=WORKER_ENVIRONMENT | os.environ,
            start_new_session=True,
        )
        if self._stopping.is_set():
            self.kill()
        return self._process

    async def _watch(self, process: asyncio.subprocess.Process) -> bool:
        """Wait for the end of the worker; True where it had said hello."""
        ended = asyncio.ensure_future(process.wait())
        try:
            while not ended.done():
                if self._num_heard(process.pid) is not None:
                    self.ready.set()
                    await self._outlive(process, ended)
                    return True
                await asyncio.wait([ended], timeout=POLL_S)
            return False
        finally:
            ended.cancel()

    async def _outlive(
        self, process: asyncio.subprocess.Process, ended: asyncio.Future[int]
    ) -> None:
        """Wait for the end of a worker that serves; where it falls silent, kill it."""
        num_silent, last_heard = 0, self._num_heard(process.pid)
        while not ended.done():
            await asyncio.wait([ended], timeout=self._look_s)
            num_heard = self._num_heard(process.pid)
            # One that is asked to end says goodbye first; `stop` has a limit of its own.
            is_silent = num_heard == last_heard and not self._stopping.is_set()
            num_silent = num_silent + 1 if is_silent else 0
            last_heard = num_heard
            if num_silent == MAX_SILENT_LOOKS and not ended.done():
                log.error(
                    "%s (pid %d) hangs: silent for %g s; killed",
                    self._config.title,
                    process.pid,
                    MAX_SILENT_LOOKS * self._look_s,
                )
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await ended

    def _give_up_where_hopeless(
        self, process: asyncio.subprocess.Process, num_failed_starts: int
    ) -> None:
        title, ending = self._config.title, _ending(process.returncode)
        if num_failed_starts and process.returncode == BAD_OPTIONS:
            raise WorkerFailedError(f"{title} cannot start; its error is above")
        if num_failed_starts >= MAX_FAILED_STARTS:
            raise WorkerFailedError(
                f"{title} ended {num_failed_starts} times before it was ready, the last"
                f" time with {ending}; its error is above"
            )


def _ending(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"signal {-returncode}"
    return f"exit code {returncode}"
