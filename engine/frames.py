"""Messages as frames, and sockets with the limits that all of ours have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

import msgspec
import zmq

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CUT_BYTES = 4  # times that: the connection is cut before it is read

# What zmq_socket_monitor(3) tells of a connection that failed, as with another key
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
HANDSHAKE_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

T = TypeVar("T")
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"


class Codec(Generic[T]):
    """Messages of one union, as msgpack."""

    def __init__(self, union: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def encode(self, message: object) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes) -> T | None:
        """The message, or None when the frame is too large or not one of ours."""
        if len(frame) > MAX_MESSAGE_BYTES:
            return None
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


def open_socket(context: Context, kind: int) -> Socket:
    """A socket of ours: `kind` as zmq.ROUTER. What is several times larger than MAX_MESSAGE_BYTES
    breaks the connection that it comes over."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 1000)  # ms
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, _CUT_BYTES * MAX_MESSAGE_BYTES)
    return sock


def is_ipv6(address: str) -> bool:
    """Such as tcp://[fd00::7]:7000. A socket that may speak both says so of every address."""
    return address.startswith("tcp://[")


def drain(sock: Socket) -> Iterator[list[bytes]]:
    """The messages that are there, each as its frames."""
    while True:
        try:
            frames: list[bytes] = sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield frames
