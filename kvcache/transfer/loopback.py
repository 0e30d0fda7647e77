"""The transfer port within one process, by memmove: for unit tests of what uses the port."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from kvcache.transfer.base import TransferError, Write
from kvcache.transfer.sessions import SessionThreads


class Stall:
    """Holds writes back: `reached` is set when the first one waits, `release` lets them go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def release(self) -> None:
        self.go.set()


class LoopbackNetwork:
    """The engines that can reach each other."""

    def __init__(self) -> None:
        self._engines: dict[str, LoopbackEngine] = {}

    def engine(self) -> LoopbackEngine:
        session = f"loopback:{len(self._engines) + 1}"
        self._engines[session] = LoopbackEngine(self, session)
        return self._engines[session]

    def peer(self, session: str) -> LoopbackEngine:
        """Raises TransferError where no open engine has that session."""
        engine = self._engines.get(session)
        if engine is None or engine.is_closed:
            raise TransferError(f"write to {session}: no such session")
        return engine


class LoopbackEngine:
    protocol = "loopback"

    def __init__(self, network: LoopbackNetwork, session: str) -> None:
        self.session = session
        self.is_closed = False
        self.written: list[tuple[str, Write]] = []  # all that landed, in order
        self._network = network
        self._regions: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._failures = 0
        self._stalls: list[Stall] = []
        self._threads = SessionThreads(self._write_batch, "loopback")

    def fail_next(self, num_writes: int) -> None:
        """The next calls of write() that begin fail, and none of their bytes land."""
        with self._lock:
            self._failures += num_writes

    def stall_next(self, num_writes: int = 1) -> Stall:
        """The next calls of write() that begin wait for the stall's release before bytes move."""
        stall = Stall()
        with self._lock:
            self._stalls += [stall] * num_writes
        return stall

    def register(self, address: int, num_bytes: int) -> None:
        self._regions.append((address, address + num_bytes))

    def write(self, session: str, writes: Sequence[Write]) -> Future[None]:
        return self._threads.submit(session, writes)

    def _write_batch(
        self, session: str, writes: Sequence[Write], abandoned: threading.Event
    ) -> None:
        with self._lock:
            stall = self._stalls.pop(0) if self._stalls else None
        if stall is not None:
            stall.reached.set()
            while not stall.go.wait(0.01):
                if abandoned.is_set():
                    raise TransferError(f"write to {session}: the peer was given up")
        with self._lock:
            fails = self._failures > 0
            self._failures -= fails
        if fails:
            raise TransferError(f"write to {session}: told to fail")
        peer = self._network.peer(session)
        for write in writes:
            if not self._covers(write.source, write.num_bytes):
                raise TransferError(f"source {write.source:#x} is not registered")
            if not peer._covers(write.destination, write.num_bytes):
                raise TransferError(f"destination {write.destination:#x} is not registered there")
            ctypes.memmove(write.destination, write.source, write.num_bytes)
            self.written.append((session, write))

    def _covers(self, address: int, num_bytes: int) -> bool:
        return any(start <= address <= end - num_bytes for start, end in self._regions)

    def forget(self, session: str) -> None:
        self._threads.forget(session)

    def close(self) -> None:
        self.is_closed = True
        self._threads.close()
