"""One-way pipes of typed messages between the ranks of a group: the leader has one to each other
rank, and one that all of them report into."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

import zmq

from engine.frames import Codec, Context, open_socket
from engine.messages import ToLeader, ToRank

T = TypeVar("T")


class Pipe(Generic[T]):
    """One end of a one-way pipe of messages of one union. `receive` belongs to one thread."""

    def __init__(self, union: object, address: str, kind: int, *, binds: bool) -> None:
        self._context: Context = zmq.Context()
        self._sock = open_socket(self._context, kind)
        self._codec: Codec[T] = Codec(union)
        self._lock = threading.Lock()
        if binds:
            self._sock.bind(address)
        else:
            self._sock.connect(address)
        self.num_malformed = 0

    def encode(self, message: T) -> bytes:
        return self._codec.encode(message)

    def send(self, message: T | bytes) -> None:
        """A message, or one that `encode` gave. From any thread."""
        frame = message if isinstance(message, bytes) else self._codec.encode(message)
        with self._lock:
            self._sock.send(frame)

    def receive(self, timeout_s: float) -> T | None:
        """The next message; None when none came in time."""
        if not self._sock.poll(int(timeout_s * 1000)):
            return None
        message = self._codec.decode(self._sock.recv())
        if message is None:
            self.num_malformed += 1
        return message

    def close(self) -> None:
        self._sock.close()
        self._context.term()


def plans_pipe(address: str, *, is_leader: bool) -> Pipe[ToRank]:
    """Leader to one rank; the leader binds and sends."""
    return Pipe(ToRank, address, zmq.PUSH if is_leader else zmq.PULL, binds=is_leader)


def reports_pipe(address: str, *, is_leader: bool) -> Pipe[ToLeader]:
    """All ranks to the leader, which binds and receives."""
    return Pipe(ToLeader, address, zmq.PULL if is_leader else zmq.PUSH, binds=is_leader)
