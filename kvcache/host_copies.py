"""Copies that run beside the forward: on a thread where the device is the CPU, on a stream where it
is a GPU. Knows steps to run, not what they copy.

Both mean the same: the steps of a copy run in order; copies of one lane run in the order of their
starting, those of two lanes side by side; they begin after what the caller had given to the device
before; and nobody waits but who asks for a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol, TypeAlias

import torch

Step: TypeAlias = Callable[[], None]
Lane: TypeAlias = Literal["out", "in"]
LANES: tuple[Lane, ...] = ("out", "in")


class Copy(Protocol):
    """One copy under way."""

    def wait_step(self, index: int) -> None:
        """What the caller does next happens after step `index`. Raises what the copy raised."""
        ...

    def is_done(self) -> bool:
        """Never waits. Raises what the copy raised."""
        ...

    def wait(self) -> None:
        """Until the copy has ended, however; from any thread."""
        ...

    @property
    def seconds(self) -> float:
        """From the first step's begin to the last one's end, once it is done."""
        ...


class Copier(Protocol):
    def start(self, lane: Lane, steps: Sequence[Step]) -> Copy: ...

    def close(self) -> None:
        """Wait for all that was started; start nothing more."""
        ...


def new_copier(device: torch.device) -> Copier:
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


class ThreadCopier:
    """One thread a lane. A forward on the CPU has ended before the caller starts a copy."""

    def __init__(self) -> None:
        self._threads: dict[Lane, ThreadPoolExecutor] = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=f"copy-{lane}") for lane in LANES
        }

    def start(self, lane: Lane, steps: Sequence[Step]) -> Copy:
        copy = _ThreadCopy(len(steps))
        self._threads[lane].submit(copy.run, steps)
        return copy

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()


class _ThreadCopy:
    def __init__(self, num_steps: int) -> None:
        self._passed = [threading.Event() for _ in range(num_steps)]
        self._error: Exception | None = None
        self.seconds = 0.0

    def run(self, steps: Sequence[Step]) -> None:
        begin = time.perf_counter()
        try:
            for step, passed in zip(steps[:-1], self._passed[:-1], strict=True):
                step()
                passed.set()
            steps[-1]()
        except Exception as error:
            self._error = error
        self.seconds = time.perf_counter() - begin
        for passed in self._passed:  # after a failure too: nobody waits for ever
            passed.set()

    def wait_step(self, index: int) -> None:
        self._passed[index].wait()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._passed[-1].is_set()

    def wait(self) -> None:
        self._passed[-1].wait()


class StreamCopier:
    """One stream a lane. Every tensor that a step uses must outlive the copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {
            lane: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for lane in LANES
        }

    def start(self, lane: Lane, steps: Sequence[Step]) -> Copy:
        stream = self._streams[lane]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        begin = _event()
        begin.record(stream)
        passed = []
        with torch.cuda.stream(stream):
            for step in steps:
                step()
                passed.append(_event())
                passed[-1].record(stream)
        return _StreamCopy(begin, passed)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


class _StreamCopy:
    def __init__(self, begin: torch.cuda.Event, passed: list[torch.cuda.Event]) -> None:
        self._begin = begin
        self._passed = passed

    def wait_step(self, index: int) -> None:
        torch.cuda.current_stream().wait_event(self._passed[index])

    def is_done(self) -> bool:
        return bool(self._passed[-1].query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._passed[-1].synchronize()

    @property
    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._passed[-1])) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
