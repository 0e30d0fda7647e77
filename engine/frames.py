"""Messages as frames, and sockets with the limits that all of ours have."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

import msgspec
import zmq

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CUT_BYTES = 4  # times that: the connection is cut before it is read

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
