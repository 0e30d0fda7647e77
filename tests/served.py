"""A running `plait` command, as a user starts it, in a process of its own; mostly `plait serve`."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx
import psutil

PLAIT = [sys.executable, "-m", "server"]
BREATH_S = 0.05  # between two questions: the cores are for what is waited for
LINE_TIMEOUT_S = 180.0  # only reached when something hangs
CORES = sorted(os.sched_getaffinity(0))
_PLACE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
MINE = CORES[_PLACE % len(CORES)]  # another one for each of the processes that run the tests
SAMPLE = re.compile(r"(\w+)(\{.*\})? (\S+)")
READY = re.compile(r"is ready \(pid (\d+)\)")


class Metrics:
    """A scrape's samples."""

    def __init__(self, page: str) -> None:
        lines = [line for line in page.splitlines() if not line.startswith("#")]
        self._samples = [SAMPLE.fullmatch(line) for line in lines]

    def __call__(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples, or of those with a label such as 'state="free"'."""
        found = [sample for sample in self._samples if sample and sample[1] == name]
        assert found, name
        return sum(float(sample[3]) for sample in found if label in (sample[2] or ""))


class Running:
    """A command under way. `wait_for` reads its output, both streams together."""

    def __init__(self, *argv: str, new_group: bool = False) -> None:
        self.process = subprocess.Popen(
            [*PLAIT, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=new_group,
        )
        # One core, hence one thread: threads that wait for each other crawl on a busy machine.
        psutil.Process(self.process.pid).cpu_affinity([MINE])
        assert self.process.stdout is not None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()
        self.seen: list[str] = []

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        while (line := self._lines.get(timeout=LINE_TIMEOUT_S)) is not None:
            self.seen.append(line)
            if match := pattern.search(line):
                return match
        raise AssertionError(f"{pattern.pattern} was not printed:\n{''.join(self.seen)}")

    def output(self) -> str:
        """All that it has printed up to now."""
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get_nowait()) is not None:
                self.seen.append(line)
        return "".join(self.seen)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def until(self, holds: Callable[[], bool]) -> None:
        """Asks again and again; the test's timeout bounds it."""
        while not holds():
            assert self.process.poll() is None, "".join(self.seen)
            time.sleep(BREATH_S)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(LINE_TIMEOUT_S)

    def stop(self) -> None:
        """End it as a user does; it must say so with code 0 and leave no process behind."""
        workers = self.workers()
        self.send(signal.SIGTERM)
        assert (code := self.wait()) == 0, f"exit code {code}"
        left = [worker for worker in workers if worker.is_running()]
        assert not left, f"left: {left}"

    def close(self) -> None:
        """Ends what is left, front end first, and reads the output to its end."""
        left: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            left = self.workers()
        self.process.kill()
        self.process.wait()
        for worker in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class FrontEnd(Running):
    """One that serves HTTP."""

    url = ""

    def wait_serving(self) -> None:
        # The front end's threads do not wait for each other: they may have every core.
        psutil.Process(self.process.pid).cpu_affinity(CORES)
        self.url = self.wait_for(re.compile(r"ready after .*(http://\S+)"))[1]

    def metrics(self) -> Metrics:
        """As they are now, all at one moment."""
        return Metrics(httpx.get(f"{self.url}/metrics", timeout=60).text)


class Served(FrontEnd):
    """`plait serve`."""

    def __init__(self, model: Path, *flags: str) -> None:
        argv = ["--model", str(model), "--port", "0", "--dtype", "float32", "--device", "cpu"]
        argv += ["--max-total-tokens", "8192"]
        super().__init__("serve", *argv, *flags)
        self.model = model.name

    def wait_ready(self) -> int:
        """The worker's pid."""
        pid = int(self.wait_for(READY)[1])
        self.wait_serving()
        return pid

    def wait_replaced(self) -> int:
        """The pid of the worker that came after the first one."""
        return int(self.wait_for(READY)[1])


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[Served]:
    served = Served(model, *flags)
    try:
        yield served
    finally:
        served.close()
