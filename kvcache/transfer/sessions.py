"""Threads of a transfer engine: one for each session that has something to write, none for others.

Owns order and isolation of sessions. How a batch is written is a function it is given.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

from kvcache.transfer.base import TransferError, Write

# Writes a batch to a session; raises TransferError. Returns soon after the event has been set.
WriteBatch: TypeAlias = Callable[[str, Sequence[Write], threading.Event], None]


class _Session:
    def __init__(self) -> None:
        self.waiting: deque[tuple[Sequence[Write], Future[None]]] = deque()
        self.abandoned = threading.Event()
        self.thread: threading.Thread | None = None


class SessionThreads:
    """Thread-safe. A session's thread starts with its first write and ends when none waits."""

    def __init__(self, write_batch: WriteBatch, name: str) -> None:
        self._write_batch = write_batch
        self._name = name
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._leaving: list[threading.Thread] = []  # of forgotten sessions
        self._is_closed = False

    def submit(self, session: str, writes: Sequence[Write]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(TransferError(f"write to {session}: the engine is closed"))
                return future
            entry = self._sessions.setdefault(session, _Session())
            entry.waiting.append((writes, future))
            if entry.thread is None:
                entry.thread = threading.Thread(
                    target=self._run, args=(session, entry), name=f"{self._name} {session}"
                )
                entry.thread.daemon = True
                entry.thread.start()
        return future

    def _run(self, session: str, entry: _Session) -> None:
        while True:
            with self._lock:
                if not entry.waiting:
                    entry.thread = None
                    if self._sessions.get(session) is entry:
                        del self._sessions[session]
                    return
                writes, future = entry.waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if entry.abandoned.is_set():
                    raise TransferError(f"write to {session}: the peer was given up")
                self._write_batch(session, writes, entry.abandoned)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def forget(self, session: str) -> None:
        with self._lock:
            self._leaving = [thread for thread in self._leaving if thread.is_alive()]
            entry = self._sessions.pop(session, None)
            if entry is not None:
                entry.abandoned.set()
                if entry.thread is not None:
                    self._leaving.append(entry.thread)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            sessions = list(self._sessions)
        for session in sessions:
            self.forget(session)
        for thread in self._leaving:
            thread.join()
        self._leaving.clear()
