"""One address that this process dials: the connection, whether it stands, when to try again.

Owns the socket and its monitor. Knows frames, and no message but the one that it is given to begin
each connection with.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.cluster_key import ClusterKey
from engine.frames import HANDSHAKE_FAILED, Context, Socket, drain, is_ipv6, open_socket

log = logging.getLogger("plait.channel")

_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2000
_MANY_REFUSALS = 3
# zmq_socket_monitor(3): what a socket tells of its connections.
_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED


class Dialled:
    """Registered with `poller` as long as it is open; what that finds ready is given to `receive`
    and then to `look`. Raises OSError where `address` is none."""

    def __init__(
        self,
        address: str,
        context: Context,
        poller: zmq.Poller,
        key: ClusterKey | None,
        register: bytes,
    ) -> None:
        self._address = address
        self._context = context
        self._poller = poller
        self._key = key
        self._register = register
        self._num_refusals = 0  # in a row
        self._connect()

    def _connect(self) -> None:
        """A new socket, so that nothing meant for the peer before it reaches the next."""
        self.is_up = False
        self._has_sent = False  # more than who dials
        self._again_at: float | None = 0.0  # closed until then; None: open
        try:
            self._sock = open_socket(self._context, zmq.DEALER)
        except zmq.ZMQError as error:
            raise OSError(f"cannot dial {self._address}: {error}") from error
        self._sock.setsockopt(zmq.IPV6, is_ipv6(self._address))
        self._sock.setsockopt(zmq.LINGER, 0)
        self._sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._sock.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
        if self._key is not None:
            self._sock.curve_serverkey = self._key.public
            self._sock.curve_secretkey = self._key.secret
            self._sock.curve_publickey = self._key.public
        self._monitor: Socket = self._sock.get_monitor_socket(_EVENTS)
        try:
            self._sock.connect(self._address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise OSError(
                f"cannot dial {self._address}: {error}; expected ipc:///path or tcp://host:port"
            ) from error
        self._sock.send(self._register)
        self._poller.register(self._sock, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._again_at = None

    def send(self, frame: bytes) -> None:
        """Lost where the connection is: then `look` says so."""
        self._has_sent = True
        if self._again_at is None:
            self._sock.send(frame, copy=False)

    def send_alive(self, frame: bytes) -> None:
        """Nothing is lost with it: where the connection does not stand, it is not sent."""
        if self.is_up:
            self._sock.send(frame)

    def receive(self, ready: Mapping[object, int]) -> Iterator[list[bytes]]:
        """The messages that are there, as frames. Where the connection is said to be over, all that
        came over it is there, although the poll may have looked for messages before they came."""
        is_ready = self._again_at is None and (self._sock in ready or self._monitor in ready)
        return drain(self._sock) if is_ready else iter(())

    def look(self, ready: Mapping[object, int]) -> bool:
        """See what has become of the connection, and dial anew where it is time. True where one was
        lost: what was under way is lost with it."""
        if self._again_at is not None:
            is_lost, self._has_sent = self._has_sent, False
            if time.monotonic() >= self._again_at:
                self._connect()
            return is_lost
        if self._monitor not in ready:
            return False
        event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_up = True
            return False
        was_up = self.is_up
        self.close()
        if was_up:
            self._num_refusals = 0
            self._connect()
        else:
            self._wait()
        return was_up

    def _wait(self) -> None:
        """It refused: libzmq itself would try again too often or, after some failures, never."""
        wait_ms = min(_RECONNECT_MS << min(self._num_refusals, 8), _RECONNECT_MAX_MS)
        self._again_at = time.monotonic() + wait_ms / 1000
        self._num_refusals += 1
        if self._num_refusals == _MANY_REFUSALS:
            log.error(
                "%s refuses connections: is that a plait worker with %s cluster key?",
                self._address,
                "the same" if self._key is not None else "no",
            )

    def close(self) -> None:
        if self._again_at is None:
            self._again_at = 0.0
            self.is_up = False
            self._poller.unregister(self._sock)
            self._poller.unregister(self._monitor)
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._sock.disable_monitor()
        self._monitor.close()
        self._sock.close()
