"""Typed ZeroMQ sockets: between a front end and its workers, and between a group's ranks.

Owns framing, limits and counting of malformed messages. Knows no request state. The front end binds
a ROUTER; each worker connects a DEALER whose identity is its instance id. A group's leader has a
one-way pipe to each other rank and one that all of them report into.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import zmq

from engine.messages import ToFrontend, ToLeader, ToRank, ToWorker

MAX_MESSAGE_BYTES = 256 * 1024 * 1024

T = TypeVar("T")


class _Codec(Generic[T]):
    def __init__(self, union: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def encode(self, message: object) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes) -> T | None:
        """The message, or None when the frame is not one of ours."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 1000)  # ms
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return sock


class WorkerChannel:
    """A worker's end. Not thread-safe."""

    def __init__(self, address: str, instance_id: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sock = _open(self._context, zmq.DEALER)
        self._sock.setsockopt(zmq.IDENTITY, instance_id.encode())
        self._sock.connect(address)
        self._codec: _Codec[ToWorker] = _Codec(ToWorker)
        self.num_malformed = 0

    def send(self, message: ToFrontend) -> None:
        self._sock.send(self._codec.encode(message), copy=False)

    def receive(self, timeout_s: float) -> list[ToWorker]:
        """All messages that are there; waits up to `timeout_s` for the first."""
        messages: list[ToWorker] = []
        if not self._sock.poll(int(timeout_s * 1000)):
            return messages
        while True:
            try:
                frame = self._sock.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            message = self._codec.decode(frame)
            if message is None:
                self.num_malformed += 1
            else:
                messages.append(message)

    def close(self) -> None:
        self._sock.close()
        self._context.term()


class FrontendChannel:
    """The front end's end. `receive` and `send` belong to one thread; `post` may be called from one
    other thread (the event loop's) and is carried out by `receive`."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sock = _open(self._context, zmq.ROUTER)
        self._sock.bind(address)
        inbox = f"inproc://outbox-{id(self)}"
        self._outbox_in = _open(self._context, zmq.PULL)
        self._outbox_in.bind(inbox)
        self._outbox_out = _open(self._context, zmq.PUSH)
        self._outbox_out.connect(inbox)
        self._codec: _Codec[ToFrontend] = _Codec(ToFrontend)
        self._poller = zmq.Poller()
        self._poller.register(self._sock, zmq.POLLIN)
        self._poller.register(self._outbox_in, zmq.POLLIN)
        self.address = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_malformed = 0

    def post(self, instance_id: str, message: ToWorker) -> None:
        """Send from the posting thread. A message to a worker that is gone is dropped."""
        self._outbox_out.send_multipart([instance_id.encode(), self._codec.encode(message)])

    def wake(self) -> None:
        """Make a waiting `receive` return (posting thread)."""
        self._outbox_out.send_multipart([b"", b""])

    def receive(self, timeout_s: float) -> list[tuple[str, ToFrontend]]:
        """(instance_id, message) of all that is there; waits up to `timeout_s` for the first."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._outbox_in in ready:
            self._flush_outbox()
        return self._drain_socket() if self._sock in ready else []

    def _flush_outbox(self) -> None:
        while True:
            try:
                frames = self._outbox_in.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frames[0]:
                self._sock.send_multipart(frames)

    def _drain_socket(self) -> list[tuple[str, ToFrontend]]:
        messages: list[tuple[str, ToFrontend]] = []
        while True:
            try:
                frames = self._sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            message = self._codec.decode(frames[1]) if len(frames) == 2 else None
            if message is None:
                self.num_malformed += 1
            else:
                messages.append((frames[0].decode(errors="replace"), message))

    def close(self) -> None:
        for sock in (self._sock, self._outbox_in, self._outbox_out):
            sock.close()
        self._context.term()


class Pipe(Generic[T]):
    """One end of a one-way pipe of messages of one union. Belongs to the thread that made it."""

    def __init__(self, union: object, address: str, kind: int, *, binds: bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sock = _open(self._context, kind)
        self._codec: _Codec[T] = _Codec(union)
        if binds:
            self._sock.bind(address)
        else:
            self._sock.connect(address)
        self.num_malformed = 0

    def encode(self, message: T) -> bytes:
        return self._codec.encode(message)

    def send(self, message: T | bytes) -> None:
        """A message, or one that `encode` gave."""
        self._sock.send(message if isinstance(message, bytes) else self._codec.encode(message))

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
