"""Typed ZeroMQ sockets between front ends and workers, and between workers.

Owns the bound socket, and counts malformed messages. Knows no request state. A worker binds a
ROUTER; front ends and decode workers dial it, with a DEALER for each worker: see engine.dialled.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import dataclass
from typing import TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.cluster_key import ClusterKey, admit_only
from engine.dialled import Dialled
from engine.frames import HANDSHAKE_FAILED, Codec, Context, Socket, drain, is_ipv6, open_socket
from engine.messages import Alive, PeerKind, Register, ToDialer, ToWorker

log = logging.getLogger("plait.channel")

ALIVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to a dialled address broke: what was under way is lost, a new one is tried."""


Event: TypeAlias = "ToWorker | ToDialer | Disconnected"


class Channel:
    """One process's talk with its peers: those that dial it, named by the identity they came with,
    and those that it dials, named by their address. `send` and `receive` belong to one thread;
    `post` and `wake` may be called from any and take effect in `receive`.

    A dialled address is told who dials it with the first message of each connection, and that this
    process is alive about once a second as long as `receive` is called.
    """

    def __init__(
        self,
        kind: PeerKind,
        name: str | None = None,
        *,
        bind: str | None = None,
        key: ClusterKey | None = None,
    ) -> None:
        self.name = name or uuid.uuid4().hex
        self._kind = kind
        self._key = key
        self._context: Context = zmq.Context()
        self._auth = admit_only(self._context, key) if bind is not None and key else None
        self._poller = zmq.Poller()
        self._asked: Codec[ToWorker] = Codec(ToWorker)
        self._answered: Codec[ToDialer] = Codec(ToDialer)
        self._dialled: dict[str, Dialled] = {}
        self._inbox = f"inproc://outbox-{id(self)}"
        self._outbox_in = open_socket(self._context, zmq.PULL)
        self._outbox_in.bind(self._inbox)
        self._outbox_out = open_socket(self._context, zmq.PUSH)
        self._outbox_out.connect(self._inbox)
        self._outbox_lock = threading.Lock()
        self._poller.register(self._outbox_in, zmq.POLLIN)
        self._bound: Socket | None = None
        self._door: Socket | None = None  # monitor of the bound socket
        self.num_malformed = 0
        self.num_refused = 0  # connections that failed at the handshake, as with another key
        self.address = ""  # where peers reach this process, where it is bound
        if bind is not None:
            self._bind(bind)
        self._alive_at = 0.0
        self._complained: set[str] = set()

    def _bind(self, address: str) -> None:
        self._bound = open_socket(self._context, zmq.ROUTER)
        self._bound.setsockopt(zmq.IPV6, is_ipv6(address))
        if self._key is not None:
            self._bound.curve_server = True
            self._bound.curve_secretkey = self._key.secret
            self._bound.curve_publickey = self._key.public
        try:
            self._bound.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(
                f"cannot listen on {address}: {error}; expected ipc:///path or tcp://host:port of "
                "this machine that is free"
            ) from error
        self.address = self._bound.getsockopt_string(zmq.LAST_ENDPOINT)
        self._door = self._bound.get_monitor_socket(HANDSHAKE_FAILED)
        self._poller.register(self._bound, zmq.POLLIN)
        self._poller.register(self._door, zmq.POLLIN)

    # -- peers that this process dials

    def dial(self, address: str) -> None:
        """Connect, and stay connected, to the worker at `address`; nothing where it is done.
        Raises OSError where that is no address."""
        if address not in self._dialled:
            register = self._asked.encode(Register(kind=self._kind, name=self.name))
            self._dialled[address] = Dialled(
                address, self._context, self._poller, self._key, register
            )

    def hang_up(self, address: str) -> None:
        dialled = self._dialled.pop(address, None)
        if dialled is not None:
            dialled.close()

    def alive(self) -> None:
        """Tell every dialled peer that this process is there."""
        frame = self._asked.encode(Alive())
        self._alive_at = time.monotonic()
        for dialled in self._dialled.values():
            dialled.send_alive(frame)

    # -- messages

    def send(self, peer: str, message: ToWorker | ToDialer) -> None:
        """To a dialled address or to the identity of one that dialled. Dropped where it is gone."""
        dialled = self._dialled.get(peer)
        if dialled is not None:
            dialled.send(self._asked.encode(message))
        elif self._bound is not None:
            frame = self._answered.encode(message)
            self._bound.send_multipart([peer.encode(), frame], copy=False)

    def post(self, peer: str, message: ToWorker | ToDialer) -> None:
        """`send` from any thread."""
        codec = self._asked if "://" in peer else self._answered
        with self._outbox_lock:
            self._outbox_out.send_multipart([peer.encode(), codec.encode(message)])

    def post_dial(self, address: str) -> None:
        """`dial` from any thread; what is no address is logged."""
        with self._outbox_lock:
            self._outbox_out.send_multipart([address.encode(), b""])

    def post_hang_up(self, address: str) -> None:
        """`hang_up` from any thread."""
        with self._outbox_lock:
            self._outbox_out.send_multipart([address.encode()])

    def wake(self) -> None:
        """Make a waiting `receive` return."""
        with self._outbox_lock:
            self._outbox_out.send_multipart([b""])

    def receive(self, timeout_s: float) -> list[tuple[str, Event]]:
        """(peer, message) of all that is there; waits up to `timeout_s` for the first. Of one peer
        they are in order."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if time.monotonic() - self._alive_at >= ALIVE_S:
            self.alive()
        if self._outbox_in in ready:
            self._flush_outbox()
        received: list[tuple[str, Event]] = []
        if self._bound is not None and self._bound in ready:
            self._drain_bound(self._bound, received)
        if self._door is not None and self._door in ready:
            self._count_refused(self._door)
        for address, dialled in list(self._dialled.items()):
            for frames in dialled.receive(ready):
                message = self._answered.decode(frames[0]) if len(frames) == 1 else None
                if message is None:
                    self._drop(address)
                else:
                    received.append((address, message))
            if dialled.look(ready):
                received.append((address, Disconnected()))
        return received

    def _flush_outbox(self) -> None:
        for frames in drain(self._outbox_in):
            peer = frames[0].decode()
            if not peer:
                continue
            if len(frames) == 1:
                self.hang_up(peer)
            elif not frames[1]:
                try:
                    self.dial(peer)
                except OSError as error:
                    log.error("%s", error)
            elif peer in self._dialled:
                self._dialled[peer].send(frames[1])
            elif self._bound is not None:
                self._bound.send_multipart(frames)

    def _drain_bound(self, bound: Socket, received: list[tuple[str, Event]]) -> None:
        for frames in drain(bound):
            message = self._asked.decode(frames[1]) if len(frames) == 2 else None
            peer = frames[0].decode(errors="replace")
            if message is None or "://" in peer:  # who dials has no address
                self._drop(peer)
            else:
                received.append((peer, message))

    def _drop(self, peer: str) -> None:
        self.num_malformed += 1
        if peer not in self._complained and len(self._complained) < 1000:
            self._complained.add(peer)
            log.warning("a message of %r is none of ours and was dropped; more are counted", peer)

    def _count_refused(self, door: Socket) -> None:
        while door.poll(0):
            recv_monitor_message(door, zmq.NOBLOCK)
            self.num_refused += 1
            if self.num_refused == 1:
                log.warning(
                    "a connection to %s failed at its handshake: a peer with %s, or none of ours; "
                    "more are counted",
                    self.address,
                    "another cluster key or none" if self._key is not None else "a cluster key",
                )

    def close(self) -> None:
        for address in list(self._dialled):
            self.hang_up(address)
        if self._bound is not None and self._door is not None:
            self._bound.disable_monitor()
            self._door.close()
        for sock in (self._bound, self._outbox_in, self._outbox_out):
            if sock is not None:
                sock.close()
        if self._auth is not None:
            self._auth.stop()
        self._context.term()
