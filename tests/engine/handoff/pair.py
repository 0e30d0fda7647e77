"""A prefill worker and a decode worker in this process, with a wire between them that a test holds:
everything of the two but sockets and processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.config import WorkerConfig
from engine.engine import Engine
from engine.inbox import Inbox
from engine.loading import load_engine
from engine.messages import (
    Abort,
    Alive,
    Hello,
    Outputs,
    Register,
    Route,
    Submit,
    ToDialer,
    ToWorker,
)
from engine.metrics.worker import WorkerMetrics
from engine.stopwatch import Stopwatch
from engine.tracing import NO_TRACER, Tracer
from engine.types import Request, SamplingParams, TokenOut

PREFILL = "ipc://prefill"
FRONT, DECODE = "front-connection", "decode-connection"
REGISTER = Register(kind="worker", name="decode")


class Wire:
    """What a worker takes for its channel."""

    def __init__(self, pair: Pair, is_decode: bool) -> None:
        self._pair = pair
        self._is_decode = is_decode
        self._is_dialled = is_decode

    def dial(self, address: str) -> None:
        assert address == PREFILL
        if not self._is_dialled:
            self._is_dialled = True
            self._pair.to_prefill.append(REGISTER)

    def hang_up(self, address: str) -> None:
        assert address == PREFILL
        self._is_dialled = False
        self._pair.to_prefill.clear()
        self._pair.to_decode.clear()

    def send(self, peer: str, message: Any) -> None:
        # Over the wire and back: what cannot be encoded shows here.
        union = ToWorker if peer == PREFILL else ToDialer
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union)
        if peer == FRONT:
            self._pair.see(message, self._is_decode)
        elif peer == PREFILL:
            self._pair.to_prefill.append(message)
        else:
            self._pair.to_decode.append(message)


class Node:
    def __init__(self, pair: Pair, config: WorkerConfig, wire: Wire) -> None:
        self.engine: Engine = load_engine(config)
        self.scheduler = self.engine.scheduler
        capacity = self.engine.capacity
        hello = Hello(
            instance_id=config.role,
            role=config.role,
            pid=1,
            host="",
            model="",
            vocab_size=self.engine.vocab_size,
            context_length=capacity.context_length,
            page_size=capacity.page_size,
            total_pages=capacity.logical_pages,
            model_id=self.engine.model_id,
        )
        self.metrics = WorkerMetrics(config.role)
        stopwatch = Stopwatch(self.metrics.observe_stage, pair.tracers.get(config.role, NO_TRACER))
        self.inbox = Inbox(wire, self.engine, hello, stopwatch)  # type: ignore[arg-type]
        self.inbox.take(FRONT, Register(kind="frontend", name="front"))
        self.total_pages = capacity.logical_pages
        self.before_step: Callable[[], None] = lambda: None  # after reports, before a page changes

    def turn(self) -> bool:
        """A round of the worker's loop; whether a step was executed."""
        for report in self.engine.mailbox.take():
            self.engine.report(report)
        self.inbox.send_notes()
        self.before_step()
        plan = self.scheduler.plan()
        self.inbox.send_notes()
        if plan is not None:
            self.inbox.send(self.scheduler.update(plan, self.engine.execute(plan)))
            self.inbox.send_notes()
        return plan is not None

    def assert_all_given_back(self) -> None:
        load = self.scheduler.load
        assert (load.num_running, load.num_waiting, load.num_rooms) == (0, 0, 0)
        assert load.locked_pages == load.fenced_pages == 0
        assert load.free_pages + load.evictable_pages == self.total_pages
        self.scheduler.cache.check()
        self.inbox.forget_owners()
        assert len(self.inbox._stopwatch) == len(self.inbox._stopwatch._rooms) == 0


class Pair:
    def __init__(
        self,
        folder: Path,
        *,
        prefill: Any = None,
        decode: Any = None,
        tracers: Mapping[str, Tracer] | None = None,  # by role
    ) -> None:
        self.tracers = tracers or {}
        self.to_prefill: deque[Any] = deque()
        self.to_decode: deque[Any] = deque()
        self.outs: dict[str, list[TokenOut]] = {}
        self.hand_backs: list[Any] = []
        self.from_decode: set[str] = set()  # rids that the decode worker has said a token of
        common = {"model": str(folder), "listen_address": "", "dtype": "float32"}
        self.prefill = Node(
            self,
            WorkerConfig(role="prefill", **common, **{"device": "cpu", **(prefill or {})}),  # type: ignore[arg-type]
            Wire(self, False),
        )
        self.decode = Node(
            self,
            WorkerConfig(role="decode", **common, **{"device": "cpu", **(decode or {})}),  # type: ignore[arg-type]
            Wire(self, True),
        )
        self.prefill.inbox.take(DECODE, REGISTER)

    def close(self) -> None:
        self.decode.engine.close()
        self.prefill.engine.close()

    def see(self, message: ToDialer, is_decode: bool) -> None:
        if isinstance(message, Outputs):
            for out in message.outs:
                self.outs.setdefault(out.rid, []).append(out)
                if is_decode and out.ids:
                    self.from_decode.add(out.rid)
        elif type(message).__name__ == "HandBack":
            self.hand_backs.append(message)

    def submit(
        self,
        rid: str,
        prompt: list[int],
        *,
        room: str = "",
        attempt: int = 0,
        traceparent: str = "",
        pin_s: int = 0,
        **sampling: Any,
    ) -> None:
        sampling.setdefault("max_tokens", 12)
        output_ids = sampling.pop("output_ids", [])
        request = Request(
            rid=rid, token_ids=prompt, sampling=SamplingParams(**sampling), pin_s=pin_s
        )
        route = Route(room=room or f"room-{rid}-{attempt}", prefill_address=PREFILL)
        self.decode.inbox.take(FRONT, Submit(request, output_ids, attempt, route, traceparent))

    def abort(self, rid: str, attempt: int = 0) -> None:
        for node in (self.prefill, self.decode):
            node.inbox.take(FRONT, Abort(rid, attempt))

    def deliver(self) -> None:
        while self.to_prefill:
            self.prefill.inbox.take(DECODE, self.to_prefill.popleft())
        while self.to_decode:
            self.decode.inbox.take(PREFILL, self.to_decode.popleft())

    def turn(self) -> bool:
        """One round of everybody."""
        self.deliver()
        stepped = self.prefill.turn()
        self.deliver()
        return self.decode.turn() or stepped or bool(self.to_prefill or self.to_decode)

    def look(self) -> None:
        """Two seconds pass: everybody but a lost prefill group gives a sign of life."""
        for node, peers in ((self.prefill, (FRONT, DECODE)), (self.decode, (FRONT,))):
            for peer in peers:
                node.inbox.take(peer, Alive())
            node.inbox.look()

    def run(self) -> None:
        """Until nobody has anything to do; waits for transfers as long as the test's timeout."""
        schedulers = (self.prefill.scheduler, self.decode.scheduler)
        while self.turn() or any(s.cache.num_under_way or not s.is_idle for s in schedulers):
            pass

    def tokens(self, rid: str) -> list[int]:
        outs = sorted(self.outs[rid], key=lambda out: out.index)
        ids: list[int] = []
        for out in outs:
            assert out.index == len(ids), "a token is missing or came twice"
            ids += out.ids
        return ids

    def end(self, rid: str) -> TokenOut:
        (end,) = [out for out in self.outs[rid] if out.finish_reason]
        return end

    def assert_all_given_back(self) -> None:
        self.prefill.assert_all_given_back()
        self.decode.assert_all_given_back()
