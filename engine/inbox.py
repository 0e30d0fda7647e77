"""What a worker is told and by whom: messages to the scheduler's verbs, its notes to their peers.

Owns who has which request and who is there. Decides nothing about pages or order. Not thread-safe.
"""

from __future__ import annotations

import logging
from collections import Counter

from engine.channel import Channel, Disconnected, Event
from engine.engine import Engine
from engine.handoff.room import Incoming, Outgoing
from engine.messages import (
    Abort,
    CloseRoom,
    Drain,
    HandBack,
    Handoff,
    Hello,
    Outputs,
    Prefill,
    Register,
    RoomClosed,
    Submit,
    ToDialer,
)
from engine.peers import Peer, Peers, Upstreams
from engine.stopwatch import Stopwatch
from engine.types import TokenOut
from kvcache.events import KVEvents
from kvcache.transfer.record import mismatch

log = logging.getLogger("plait.worker")

HEARTBEAT_S = 0.5
_SNAPSHOT_HASHES = 4096  # in one message
_MAX_WAITING = 4096  # requests; more are handed back


class Inbox:
    """`refused` counts, by reason, the messages that were well-formed and made no sense."""

    def __init__(
        self, channel: Channel, engine: Engine, hello: Hello, stopwatch: Stopwatch | None = None
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._scheduler = engine.scheduler
        self._hello = hello
        self._stopwatch = Stopwatch() if stopwatch is None else stopwatch
        self._peers = Peers()
        self._upstreams = Upstreams()
        self._owners: dict[str, str] = {}  # rid -> the front end's name
        self.is_draining = False
        self.refused: Counter[str] = Counter()

    # -- what comes

    def take(self, peer_id: str, message: Event) -> None:
        """`peer_id`: the address of a dialled worker or the identity of who dialled."""
        if "://" in peer_id:
            self._take_upstream(peer_id, message)
            return
        if isinstance(message, Register):
            self._register(peer_id, message)
            return
        peer = self._peers.heard(peer_id)
        if peer is None:
            self._refuse("unregistered", f"{type(message).__name__} of an unregistered peer")
            return
        match message:
            case Submit():
                self._submit(peer, message)
            case Abort(rid=rid, attempt=attempt):
                self.send(self._scheduler.abort(rid, attempt))
            case Drain():
                self.is_draining = True
            case Prefill():
                self._prefill(peer, message)
            case CloseRoom(room=room):
                if not self._scheduler.prefill_side.close_room(room):
                    self._channel.send(peer.identity, RoomClosed(room=room))

    def _register(self, identity: str, message: Register) -> None:
        before = self._peers.register(identity, message)
        if before is not None:
            self._lose(before)
        self._channel.send(identity, self._hello)
        if message.kind == "frontend":
            self.tell_events()
            for part in self._engine.events.snapshot_parts(_SNAPSHOT_HASHES):
                self._channel.send(identity, part)

    def _submit(self, peer: Peer, message: Submit) -> None:
        request, route = message.request, message.route
        reason = self._unwilling() or self._in_use(request.rid, message.attempt)
        if not reason and route is not None and self._engine.destination is None:
            reason = "this worker takes no hand-offs"
        if reason:
            self._hand_back(peer, request.rid, message.attempt, reason)
            return
        incoming = None
        if route is not None:
            if self._scheduler.decode_side.knows(route.room):
                self._refuse("duplicate_room", f"room {route.room} was submitted twice")
                self._hand_back(peer, request.rid, message.attempt, "the room is in use")
                return
            if "://" not in route.prefill_address:
                self._refuse("address", f"{route.prefill_address!r} is no control address")
                self._hand_back(peer, request.rid, message.attempt, "the route has no address")
                return
            incoming = Incoming(route.room, route.prefill_address, peer.name, message.traceparent)
        self._owners[request.rid] = peer.name
        self._stopwatch.begin(message)
        self.send(
            self._scheduler.submit(request, message.output_ids, message.attempt, incoming=incoming)
        )

    def _prefill(self, peer: Peer, message: Prefill) -> None:
        if self._scheduler.prefill_side.knows(message.room):
            self._refuse("duplicate_room", f"room {message.room} was asked for twice")
            return
        rid = message.request.rid
        reason = self._unwilling() or self._in_use(rid, message.attempt) or self._unfit(message)
        if reason:
            owner = self._peers.named(message.frontend)
            if owner is not None:  # itself, so that it knows whose queue is full
                self._hand_back(owner, rid, message.attempt, reason)
                reason = ""
            self._channel.send(peer.identity, RoomClosed(room=message.room, reason=reason))
            return
        self._owners[rid] = message.frontend
        outgoing = Outgoing(
            room=message.room,
            decode=peer.name,
            reservation=message.reservation,
            num_pushed=message.reservation.first_position,
        )
        self._stopwatch.begin(message)
        outs = self._scheduler.submit(
            message.request, message.output_ids, message.attempt, outgoing=outgoing
        )
        self.send(outs)

    def _unwilling(self) -> str:
        if self.is_draining:
            return "the worker is shutting down"
        return "the worker's queue is full" if self._is_overloaded else ""

    def _in_use(self, rid: str, attempt: int) -> str:
        """Only a later attempt takes the place of an earlier one."""
        if self._scheduler.attempt_of(rid) < attempt or not self._scheduler.knows(rid):
            return ""
        self._refuse("request_id", f"request id {rid!r} is in use")
        return "the request id is in use"

    @property
    def _is_overloaded(self) -> bool:
        return self._scheduler.load.num_waiting >= _MAX_WAITING

    def _unfit(self, message: Prefill) -> str:
        """Why this room cannot be served here; empty where it can."""
        wanted, page_size = message.reservation, self._hello.page_size
        if self._engine.record is None:
            return "this worker hands nothing over"
        if why := mismatch(self._engine.record, wanted.pool):
            self._refuse("geometry", why)
            return why
        if wanted.model_id != self._engine.model_id:
            why = f"the models differ: here {self._engine.model_id}, there {wanted.model_id}"
            self._refuse("model", why)
            return why
        num_tokens = len(message.request.token_ids) + len(message.output_ids)
        num_pages = -(-num_tokens // page_size)
        first, end = wanted.first_position, wanted.first_position + len(wanted.dst_pages)
        bad = [page for page in wanted.dst_pages if not 1 <= page < wanted.pool.num_row_pages]
        if first < 0 or end != num_pages or bad:
            why = f"the reservation is for pages {first} to {end} of {num_pages}"
            why += f"; page {bad[0]} is outside the pool" if bad else ""
            self._refuse("reservation", why)
            return why
        if self._peers.named(message.frontend) is None:
            self._refuse("unknown_frontend", f"front end {message.frontend} is not connected here")
            return "the front end is not connected to the prefill group"
        return ""

    def _take_upstream(self, address: str, message: Event) -> None:
        if isinstance(message, Disconnected):
            self._scheduler.decode_side.lose_prefill(address)
            return
        is_new = self._upstreams.heard(
            address, message.instance_id if isinstance(message, Hello) else None
        )
        if isinstance(message, Handoff | RoomClosed):
            self._stopwatch.heard(message)
        match message:
            case Hello() if is_new:
                self._scheduler.decode_side.replaced(address)
            case Handoff(room=room, token_id=token_id):
                if not self._scheduler.decode_side.arrive(room, token_id):
                    self._refuse("unknown_room", f"a hand-off for room {room}, which is unknown")
            case RoomClosed(room=room):
                if not self._scheduler.decode_side.room_closed(message):
                    self._refuse("unknown_room", f"the end of room {room}, which is unknown")
            case _:
                pass

    def _refuse(self, kind: str, what: str) -> None:
        """Counted always, logged when it is the first of its kind."""
        self.refused[kind] += 1
        if self.refused[kind] == 1:
            log.warning("refused: %s; more of this kind are only counted", what)

    # -- who is gone

    def look(self) -> None:
        """To be called every LOOK_S, after what has come was taken."""
        for peer in self._peers.look():
            log.warning("%s %s has fallen silent", peer.kind, peer.name)
            self._lose(peer)
        for address in self._upstreams.look():
            # What was to be said there was never heard, or is refused: a group that has missed this
            # worker for as long knows it again only by a new connection.
            self._channel.hang_up(address)
            self._scheduler.decode_side.lose_prefill(address)
            if not self._scheduler.decode_side.has(address):
                self._upstreams.remove(address)
        self._scheduler.decode_side.look()

    def _lose(self, peer: Peer) -> None:
        if peer.kind == "worker":
            self._scheduler.prefill_side.lose_decode(peer.name)
            return
        for rid in [rid for rid, owner in self._owners.items() if owner == peer.name]:
            self._scheduler.abort(rid)
            self._scheduler.prefill_side.close_rooms_of(rid)

    def forget_owners(self) -> None:
        """Of requests that nothing more will be said about."""
        self._owners = {
            rid: owner for rid, owner in self._owners.items() if self._scheduler.knows(rid)
        }
        self._stopwatch.forget(self._scheduler.knows)

    # -- what goes

    def send(self, outs: list[TokenOut]) -> None:
        """To the front ends that have the requests."""
        by_owner: dict[str, list[TokenOut]] = {}
        for out in outs:
            self._stopwatch.told(out)
            by_owner.setdefault(self._owners.get(out.rid, ""), []).append(out)
        for owner, its in by_owner.items():
            peer = self._peers.named(owner)
            if peer is not None:
                self._channel.send(peer.identity, Outputs(its))

    def send_notes(self) -> None:
        """What the scheduler wants said."""
        for req in self._scheduler.started:
            self._stopwatch.started(req.rid, req.attempt)
        notes = list(self._scheduler.notes)
        self._scheduler.notes.clear()
        for note in notes:
            self._stopwatch.sent(note.message)
            if isinstance(note.message, HandBack):
                peer = self._peers.named(self._owners.get(note.message.rid, ""))
                to = peer.identity if peer is not None else None
            elif "://" in note.to:
                to = self._dial(note.to, note.message)
            else:
                peer = self._peers.named(note.to)
                to = peer.identity if peer is not None else None
            if to is not None:
                self._channel.send(to, note.message)

    def _dial(self, address: str, message: object) -> str | None:
        """The address, where it is one."""
        try:
            self._channel.dial(address)
        except OSError as error:
            self._refuse("address", str(error))
            # Notes of these are sent the next time.
            if isinstance(message, Prefill):  # nobody was asked: no byte can come
                self._scheduler.decode_side.room_closed(
                    RoomClosed(room=message.room, reason=str(error))
                )
            return None
        self._upstreams.asked(address)
        return address

    def tell_frontends(self, message: ToDialer) -> None:
        for peer in self._peers.of_kind("frontend"):
            self._channel.send(peer.identity, message)

    def tell_workers(self, message: ToDialer) -> None:
        for peer in self._peers.of_kind("worker"):
            self._channel.send(peer.identity, message)

    def tell_events(self) -> None:
        """What has changed in the prefix cache since the last time."""
        events: KVEvents | None = self._engine.events.take()
        if events is not None:
            self.tell_frontends(events)

    def _hand_back(self, peer: Peer, rid: str, attempt: int, reason: str) -> None:
        message = HandBack(
            rid=rid, attempt=attempt, reason=reason, is_overloaded=self._is_overloaded
        )
        self._channel.send(peer.identity, message)
