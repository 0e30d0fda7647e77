"""A worker that answers what a test tells it to, over a worker's real sockets and messages.

A prefill worker says a script's first token and hands over; a decode worker asks it to, then says
the rest of its own script; a colocated one says all of it.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from engine.channel import Channel, Event
from engine.cluster_key import ClusterKey
from engine.handoff.room import Reservation
from engine.messages import (
    Abort,
    Goodbye,
    HandBack,
    Handoff,
    Heartbeat,
    Hello,
    Outputs,
    PeerKind,
    Prefill,
    Register,
    RoomClosed,
    Submit,
    ToDialer,
)
from engine.types import Load, MetricFamily, ModelId, Role, TokenOut
from kvcache.transfer.record import PoolRecord
from tests.identity import MODEL_ID

Script = Callable[[Submit], Iterator[TokenOut | None]]  # None: nothing to say yet

PAGE_SIZE = 64
BEAT_S = 0.5
_PIDS = itertools.count(1_000_000)
_NO_PAGES = Reservation(
    session="127.0.0.1:1",
    pool=PoolRecord(page_size=PAGE_SIZE, num_row_pages=1, buffers=()),
    model_id=MODEL_ID,
    first_position=0,
    dst_pages=[],
)


@dataclass
class _Run:
    """A request under way: who wants its outputs, and the decode worker's room for it."""

    submit: Submit
    frontend: str  # by name
    script: Iterator[TokenOut | None]
    decode: str = ""  # identity of the decode worker that waits for the first token
    room: str = ""


class ScriptedWorker:
    """A thread with a worker's channel. `submits`, `prefills`, `aborts` are what it was sent;
    `load` and `families` are what its heartbeats say."""

    def __init__(
        self,
        address: str,
        script: Script,
        vocab_size: int,
        *,
        role: Role = "colocated",
        context_length: int = 2048,
        model_id: ModelId = MODEL_ID,
        key: ClusterKey | None = None,
    ) -> None:
        self.script = script
        self.submits: queue.Queue[Submit] = queue.Queue()
        self.prefills: queue.Queue[Prefill] = queue.Queue()
        self.aborts: queue.Queue[Abort] = queue.Queue()
        self.families: list[MetricFamily] = []
        self.load = Load()
        self._channel = Channel("worker", bind=address, key=key)
        self.instance_id = self._channel.name
        self.address = self._channel.address
        self.hello = Hello(
            instance_id=self.instance_id,
            role=role,
            pid=next(_PIDS),
            host="here",
            model="tiny",
            vocab_size=vocab_size,
            context_length=context_length,
            page_size=PAGE_SIZE,
            total_pages=1024,
            model_id=model_id,
            cp_size=2 if role == "prefill" else 1,
        )
        self._identities: dict[tuple[PeerKind, str], str] = {}  # of who has registered, by name
        self._names: dict[str, str] = {}  # the way back
        self._runs: dict[str, _Run] = {}
        self._rooms: dict[str, _Run] = {}  # those whose first token is computed elsewhere
        self._ending = threading.Event()
        self._says_goodbye = False
        self._thread = threading.Thread(target=self._serve, name="worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self.hello.pid

    @property
    def is_dialled(self) -> bool:
        """Somebody has registered."""
        return bool(self._identities)

    def vanish(self) -> None:
        """As a killed process: no word, nothing sent any more."""
        self._ending.set()
        self._thread.join()

    def leave(self) -> None:
        self._says_goodbye = True
        self.vanish()

    def say(self, message: ToDialer) -> None:
        """To every front end, out of turn."""
        for (kind, _), identity in list(self._identities.items()):
            if kind == "frontend":
                self._channel.post(identity, message)

    def say_outputs(self, outs: list[TokenOut]) -> None:
        """As they are, whatever their attempt."""
        self.say(Outputs(outs))

    def hand_back(self, submit: Submit, reason: str, *, is_overloaded: bool = False) -> None:
        """Refuse what it was given, as a worker that cannot go on."""
        self.say(
            HandBack(
                rid=submit.request.rid,
                attempt=submit.attempt,
                reason=reason,
                is_overloaded=is_overloaded,
            )
        )

    def beat(self, load: Load | None = None) -> None:
        """Say now how loaded it is."""
        self.load = load or self.load
        self.say(self._heartbeat())

    def drain(self) -> None:
        """Say that it takes nothing new, as one that was sent SIGTERM."""
        self.beat(msgspec.structs.replace(self.load, is_draining=True))

    def _heartbeat(self) -> Heartbeat:
        load = msgspec.structs.replace(self.load, num_running=len(self._runs))
        return Heartbeat(load, self.families)

    def _serve(self) -> None:
        next_beat = 0.0
        while not self._ending.is_set():
            before = len(self._runs)
            for peer, message in self._channel.receive(0.002 if self._runs else 0.02):
                self._take(peer, message)
            has_spoken = self._speak()
            if has_spoken or len(self._runs) != before or time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._tell_frontends(self._heartbeat())
        if self._says_goodbye:
            self._tell_frontends(Goodbye())
        self._channel.close()

    def _take(self, peer: str, message: Event) -> None:
        match message:
            case Register(kind=kind, name=name):
                self._identities[kind, name] = peer
                self._names[peer] = name
                self._channel.send(peer, self.hello)
            case Submit(route=None):
                self.submits.put(message)
                run = _Run(message, self._names[peer], self.script(message))
                self._runs[message.request.rid] = run
            case Submit():
                self.submits.put(message)
                self._ask(_Run(message, self._names[peer], iter(())), message)
            case Prefill():
                self.prefills.put(message)
                submit = Submit(message.request, message.output_ids, message.attempt)
                self._runs[message.request.rid] = _Run(
                    submit, message.frontend, self.script(submit), peer, message.room
                )
            case Handoff(room=room, token_id=token_id) if room in self._rooms:
                run = self._rooms.pop(room)
                ids = [*run.submit.output_ids, token_id]
                run.submit = msgspec.structs.replace(run.submit, output_ids=ids)
                run.script = self.script(run.submit)
                self._runs[run.submit.request.rid] = run
            case RoomClosed(room=room):
                self._rooms.pop(room, None)
            case Abort():
                self.aborts.put(message)
                self._abort(message)
            case _:
                pass

    def _ask(self, run: _Run, submit: Submit) -> None:
        assert submit.route is not None
        self._rooms[submit.route.room] = run
        prefill = Prefill(
            room=submit.route.room,
            frontend=run.frontend,
            request=submit.request,
            output_ids=submit.output_ids,
            attempt=submit.attempt,
            reservation=_NO_PAGES,
            traceparent=submit.traceparent,
        )
        self._channel.dial(submit.route.prefill_address)
        self._channel.send(submit.route.prefill_address, prefill)

    def _abort(self, message: Abort) -> None:
        for runs in (self._runs, self._rooms):
            for key, run in list(runs.items()):
                submit = run.submit
                if submit.request.rid == message.rid and submit.attempt <= message.attempt:
                    del runs[key]
                    out = TokenOut(rid=message.rid, index=0, finish_reason="abort")
                    self._send(run, [out])

    def _speak(self) -> bool:
        has_spoken = False
        for rid, run in list(self._runs.items()):
            out = next(run.script, None)
            if out is None:
                continue
            has_spoken = True
            self._send(run, [out])
            is_over = out.finish_reason is not None and out.rid == rid
            if run.decode and (is_over or out.ids):
                room = RoomClosed(room=run.room)
                handoff = Handoff(room=run.room, token_id=out.ids[-1] if out.ids else 0)
                self._channel.send(run.decode, room if is_over else handoff)
                is_over = True
            if is_over:
                del self._runs[rid]
        return has_spoken

    def _send(self, run: _Run, outs: list[TokenOut]) -> None:
        stamped = [msgspec.structs.replace(out, attempt=run.submit.attempt) for out in outs]
        self._channel.send(self._identities["frontend", run.frontend], Outputs(stamped))

    def _tell_frontends(self, message: ToDialer) -> None:
        for (kind, _), identity in self._identities.items():
            if kind == "frontend":
                self._channel.send(identity, message)
