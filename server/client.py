"""The front end's side of the workers: requests out, text deltas in, replays when a worker is lost.

Owns the channel and, on the event loop, which worker has which request. Text is made by the reader
thread. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.channel import FrontendChannel
from engine.messages import Abort, Drain, Goodbye, Heartbeat, Hello, Submit
from engine.types import Request
from server.answer import Answer, Delta
from server.detokenizer import AnswerText, TokenBytes
from server.fleet import Capabilities, Fleet, Worker
from server.metrics import Metrics
from server.reader import Event, Reader

logger = logging.getLogger(__name__)

ErrorKind = Literal["overloaded", "unavailable", "worker_lost", "worker_error"]


class EngineError(Exception):
    """Why a generation cannot start or go on; the message is meant for the client."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


@dataclass(frozen=True, slots=True)
class Limits:
    max_replays: int = 2
    max_queued_requests: int = 1024  # unfinished ones
    max_queued_tokens: int = 4_194_304  # prompt tokens of unfinished ones
    worker_wait_s: float = 60.0  # how long a request waits for a worker to be there


@dataclass(frozen=True, slots=True)
class Submission:
    """One choice of a generation."""

    request: Request
    choice: int
    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    continues: bool = False  # the answer's text goes on the prompt's text


@dataclass(slots=True, eq=False)
class _Live:
    """An unfinished request. Everything but `answer` belongs to the event loop."""

    request: Request
    answer: Answer
    generation: Generation
    submitted_at: float
    worker: Worker | None = None  # None: waits for one
    num_replays: int = 0
    last_token_at: float | None = None
    give_up: asyncio.TimerHandle | None = None


class Generation:
    """The deltas of some choices as they come, in batches. Iterate it to its end or `close` it;
    closing aborts what is unfinished. Raises EngineError where a choice fails."""

    def __init__(self, route: str, on_close: Callable[[Generation], None]) -> None:
        self.route = route
        self.unfinished: dict[str, _Live] = {}
        self._on_close = on_close
        self._arrived: deque[Delta] = deque()
        self._error: EngineError | None = None
        self._wake = asyncio.Event()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self.unfinished:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        deltas = list(self._arrived)
        self._arrived.clear()
        return deltas

    def close(self) -> None:
        self._on_close(self)

    def push(self, delta: Delta) -> None:
        self._arrived.append(delta)
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        self._error = self._error or error
        self._wake.set()


class _Room:
    """What the queue may hold: unfinished requests and their prompt tokens."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_requests = 0
        self._num_tokens = 0

    def take(self, num_requests: int, num_tokens: int) -> None:
        """Raises EngineError, and takes nothing, where they do not fit."""
        limits = self._limits
        if self._num_requests + num_requests > limits.max_queued_requests:
            raise EngineError(
                "overloaded",
                f"{self._num_requests} requests are unfinished, {limits.max_queued_requests} may "
                "be; try again later",
            )
        if self._num_tokens + num_tokens > limits.max_queued_tokens:
            raise EngineError(
                "overloaded",
                f"unfinished requests hold {self._num_tokens} prompt tokens; with this one's "
                f"{num_tokens} they exceed {limits.max_queued_tokens}; try again later",
            )
        self._num_requests += num_requests
        self._num_tokens += num_tokens

    def give_back(self, num_tokens: int) -> None:
        """One request ended."""
        self._num_requests -= 1
        self._num_tokens -= num_tokens


class EngineClient:
    """Bind it (constructor), `start` it on the event loop, whose thread then makes every call but
    `worker_died` and `worker_exited`, which any thread may make.

    `address` is a ZeroMQ endpoint to bind; `self.address` is what workers connect to.
    """

    def __init__(self, address: str, token_bytes: TokenBytes, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.fleet = Fleet()
        self.metrics = Metrics()
        self.metrics.watch(self.fleet)
        self.is_draining = False
        self._token_bytes = token_bytes
        self._channel = FrontendChannel(address)
        self.address = self._channel.address
        self._live: dict[str, _Live] = {}
        self._answers: dict[str, Answer] = {}  # the reader's view of _live
        self._parked: dict[str, _Live] = {}  # those that wait for a worker, oldest first
        self._room = _Room(self.limits)
        self._joined = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader = Reader(self._channel, self._answers, self._hand_over)

    @property
    def is_ready(self) -> bool:
        return len(self.fleet) > 0 and not self.is_draining

    @property
    def num_unfinished(self) -> int:
        return len(self._live)

    def start(self) -> None:
        """Begin to read; once, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._reader.start()

    async def close(self) -> None:
        """Fail what is unfinished, stop reading, close the sockets."""
        self.abort_all("the server is shutting down")
        if self._loop is not None:
            self._reader.stop()
            await asyncio.to_thread(self._reader.join)
            self._loop = None
        self._channel.close()

    async def capabilities(self) -> Capabilities:
        """Of the workers that are there, or were; waits for the first one. Raises EngineError."""
        if self.fleet.capabilities is None:
            try:
                await asyncio.wait_for(self._joined.wait(), self.limits.worker_wait_s)
            except asyncio.TimeoutError:
                raise _no_worker() from None
        assert self.fleet.capabilities is not None
        return self.fleet.capabilities

    def generate(self, submissions: Sequence[Submission], route: str) -> Generation:
        """Start all choices of one HTTP request. `route` is a label: a template, not a path.
        Raises EngineError where the queue is full, or while draining."""
        if self.is_draining:
            raise EngineError("unavailable", "the server is shutting down")
        num_tokens = sum(len(submission.request.token_ids) for submission in submissions)
        self._room.take(len(submissions), num_tokens)
        generation = Generation(route, self._close_generation)
        now = time.perf_counter()
        for submission in submissions:
            request = submission.request
            text = AnswerText(
                self._token_bytes,
                submission.stops,
                min_tokens=request.sampling.min_tokens,
                skip_special_tokens=submission.skip_special_tokens,
                continues=submission.continues,
            )
            live = _Live(request, Answer(submission.choice, text), generation, now)
            self._live[request.rid] = live
            self._answers[request.rid] = live.answer
            generation.unfinished[request.rid] = live
            self._idle.clear()
            self._dispatch(live)
        self.metrics.prompt_tokens.inc(num_tokens)
        return generation

    def worker_died(self, instance_id: str) -> None:
        """The process is gone: replay its requests elsewhere. Any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._lose, instance_id)

    def worker_exited(self, pid: int) -> None:
        """As `worker_died`, for those who know only the process. Any thread."""

        def lose() -> None:
            instance_id = self.fleet.instance_of(pid)
            if instance_id is not None:
                self._lose(instance_id)

        if self._loop is not None:
            self._loop.call_soon_threadsafe(lose)

    def start_draining(self) -> None:
        """Accept nothing new; what is unfinished goes on."""
        self.is_draining = True

    async def drained(self) -> None:
        """Returns when nothing is unfinished."""
        await self._idle.wait()

    def drain_workers(self) -> None:
        """Tell every worker to exit when it is done."""
        for worker in self.fleet:
            self._channel.post(worker.hello.instance_id, Drain())

    def abort_all(self, message: str) -> None:
        """End every unfinished request with an error that says `message`."""
        for live in list(self._live.values()):
            self._fail(live, EngineError("unavailable", message))

    # Below: the event loop only.

    def _hand_over(self, events: list[Event]) -> None:
        """Called by the reader."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._on_events, events, time.perf_counter())

    def _on_events(self, events: list[Event], received_at: float) -> None:
        for source, event in events:
            self.fleet.heard(source)
            if isinstance(event, list):
                for rid, delta in event:
                    live = self._live.get(rid)
                    if live is not None:
                        self._on_delta(live, delta, received_at)
            elif isinstance(event, Heartbeat):
                self.fleet.beat(source, event)
            elif isinstance(event, Hello) and event.instance_id == source:
                self._on_hello(event)
            elif isinstance(event, Goodbye):
                self._lose(source)

    def _on_hello(self, hello: Hello) -> None:
        if self.fleet.get(hello.instance_id) is not None:
            return
        self.fleet.join(hello)
        self._joined.set()
        logger.info("%s worker %s is ready (pid %d)", hello.role, hello.instance_id, hello.pid)
        for live in list(self._parked.values()):
            self._dispatch(live)

    def _on_delta(self, live: _Live, delta: Delta, received_at: float) -> None:
        self._observe(live, delta, received_at)
        if delta.error:
            self._fail(live, EngineError("worker_error", delta.error))
            return
        live.generation.push(delta)
        if delta.finish_reason is not None:
            if live.answer.ended_early:
                self._post_abort(live)
            self.metrics.e2e.observe(received_at - live.submitted_at)
            self._forget(live, delta.finish_reason)

    def _observe(self, live: _Live, delta: Delta, received_at: float) -> None:
        if not delta.num_tokens:
            return
        metrics = self.metrics
        metrics.output_tokens.inc(delta.num_tokens)
        if live.last_token_at is None:
            metrics.ttft.observe(received_at - live.submitted_at)
            metrics.cached_tokens.inc(delta.cached_tokens)
        else:
            each_s = (received_at - live.last_token_at) / delta.num_tokens
            for _ in range(delta.num_tokens):
                metrics.itl.observe(each_s)
        live.last_token_at = received_at

    def _dispatch(self, live: _Live) -> None:
        """Give the request to a worker, with the tokens so far, or park it until one joins."""
        worker = self.fleet.choose()
        rid = live.request.rid
        if worker is None:
            if self._loop is not None and rid not in self._parked:
                self._parked[rid] = live
                live.give_up = self._loop.call_later(
                    self.limits.worker_wait_s, self._fail, live, _no_worker()
                )
                self.metrics.num_parked = len(self._parked)
            return
        self._unpark(live)
        live.worker = worker
        worker.num_live += 1
        live.answer.source = worker.hello.instance_id
        submit = Submit(live.request, list(live.answer.token_ids))
        self._channel.post(worker.hello.instance_id, submit)

    def _lose(self, instance_id: str) -> None:
        worker = self.fleet.leave(instance_id)
        if worker is None:
            return
        lost = [live for live in self._live.values() if live.worker is worker]
        logger.warning("worker %s is gone with %d requests", instance_id, len(lost))
        for live in lost:
            live.worker = None
            live.answer.source = None
            if live.num_replays >= self.limits.max_replays:
                message = f"the request lost its worker {live.num_replays + 1} times"
                self._fail(live, EngineError("worker_lost", message))
                continue
            live.num_replays += 1
            self.metrics.replays.inc()
            self._dispatch(live)

    def _close_generation(self, generation: Generation) -> None:
        for live in list(generation.unfinished.values()):
            self.metrics.aborts.inc()
            self._post_abort(live)
            self._forget(live, "abort")

    def _fail(self, live: _Live, error: EngineError) -> None:
        self._post_abort(live)
        self._forget(live, "error")
        live.generation.fail(error)

    def _post_abort(self, live: _Live) -> None:
        if live.worker is not None:
            self._channel.post(live.worker.hello.instance_id, Abort(live.request.rid))

    def _unpark(self, live: _Live) -> None:
        if live.give_up is not None:
            live.give_up.cancel()
            live.give_up = None
        self._parked.pop(live.request.rid, None)
        self.metrics.num_parked = len(self._parked)

    def _forget(self, live: _Live, how: str) -> None:
        """The one clean-up path of every request."""
        rid = live.request.rid
        if self._live.pop(rid, None) is None:
            return
        self._answers.pop(rid, None)
        self._unpark(live)
        live.generation.unfinished.pop(rid, None)
        if live.worker is not None:
            live.worker.num_live -= 1
        self._room.give_back(len(live.request.token_ids))
        self.metrics.requests.labels(live.generation.route, how).inc()
        if not self._live:
            self._idle.set()


def _no_worker() -> EngineError:
    return EngineError("unavailable", "no worker is ready to serve; try again later")
