"""The front end's side of the workers: requests out, text deltas in, replays where one is lost.

Owns the channel and, on the event loop, which workers have which request. Text is made by the
reader thread. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Literal

from engine.channel import Channel, Disconnected
from engine.cluster_key import ClusterKey
from engine.messages import Abort, Goodbye, HandBack, Heartbeat, Hello, Route, Submit
from engine.peers import LOOK_S
from engine.tracing import NO_TRACER, Tracer
from engine.types import ModelId
from kvcache.events import page_hashes
from server.answer import Answer, Delta
from server.detokenizer import AnswerText, TokenBytes
from server.discovery.places import Place
from server.fleet import Capabilities, Fleet, Loss, Refused
from server.generation import EngineError, Generation, Limits, Live, Quota, Submission
from server.metrics import Metrics
from server.reader import Event, Reader
from server.router.prompt_hashes import prompt_hashes
from server.router.router import Router

logger = logging.getLogger(__name__)

_INLINE_TOKENS = 4096  # hashed on the event loop: more would hold it up
_FIRST_DELAY_S = 0.05  # before a request that was handed back is tried again
_MAX_DELAY_S = 2.0
_LOSSES: dict[Loss, str] = {
    "removed": "was removed",
    "ended": "has ended",
    "replaced": "was replaced",
    "exited": "has exited",
    "disconnected": "has broken the connection",
    "silent": "has fallen silent",
}


class EngineClient:
    """`start` it on the event loop, whose thread then makes every call but `worker_exited`, which
    any thread may make. `add_worker` tells where workers are, or will be; `fingerprint` what they
    have to hold, where this is known."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        limits: Limits | None = None,
        *,
        policy: str = "prefix",
        fingerprint: str = "",
        key: ClusterKey | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.tracer = tracer
        self.limits = limits or Limits()
        self.fleet = Fleet(fingerprint)
        self.addresses: dict[str, None] = {}  # where workers are, or should be
        self.places: list[Place] = []  # where addresses come from
        self.router = Router(self.fleet, policy)
        self.metrics = Metrics()
        self.metrics.watch(self.fleet)
        self.is_leaving = False  # load balancers should send new requests elsewhere
        self.is_draining = False  # new requests are refused
        self._token_bytes = token_bytes
        self._channel = Channel("frontend", key=key)
        self._live: dict[str, Live] = {}
        self._answers: dict[str, Answer] = {}  # the reader's view of _live
        self._parked: dict[str, Live] = {}  # those that wait for a worker, oldest first
        self._retired: set[str] = set()  # of the addresses, those that get nothing new
        self._quota = Quota(self.limits)
        self._model_id: ModelId | None = None  # of the workers that are there, or were
        self._joined = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looks: asyncio.TimerHandle | None = None
        self._reader = Reader(self._channel, self._answers, self.router.index, self._hand_over)

    @property
    def is_ready(self) -> bool:
        return self.fleet.can_serve and not self.is_leaving

    @property
    def num_unfinished(self) -> int:
        return len(self._live)

    def start(self) -> None:
        """Begin to read; once, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._looks = self._loop.call_later(LOOK_S, self._look)
        self._reader.start()

    def add_worker(self, address: str) -> None:
        """Dial the worker at this ZeroMQ endpoint, again whenever it goes away."""
        self.addresses[address] = None
        self._retired.discard(address)
        self._channel.post_dial(address)
        worker = self.fleet.at(address)
        if worker is not None:
            worker.is_retired = False
            self._on_joined()

    def retire_worker(self, address: str) -> None:
        """Give it nothing new, and forget it when it has done what it has."""
        if address in self.addresses:
            self._retired.add(address)
            worker = self.fleet.at(address)
            if worker is not None:
                worker.is_retired = True
            self._forget_retired()

    def remove_worker(self, address: str) -> None:
        """Forget it; what it had is replayed elsewhere."""
        self.addresses.pop(address, None)
        self._retired.discard(address)
        self._channel.post_hang_up(address)
        self._lose(address, "removed")
        self.router.index.drop(address)

    async def close(self) -> None:
        """Fail what is unfinished, stop reading, close the sockets."""
        self.abort_all("the server is shutting down")
        if self._looks is not None:
            self._looks.cancel()
        if self._loop is not None:
            self._reader.stop()
            await asyncio.to_thread(self._reader.join)
            self._loop = None
        self._channel.close()

    async def can_serve(self) -> None:
        """Returns once there were workers for a whole request, or the server shuts down."""
        await self._joined.wait()

    async def capabilities(self) -> Capabilities:
        """Of the workers that are there, or were; waits for the first one. Raises EngineError."""
        if self.fleet.capabilities is None:
            try:
                await asyncio.wait_for(self._joined.wait(), self.limits.worker_wait_s)
            except asyncio.TimeoutError:
                raise _no_worker() from None
        if self.fleet.capabilities is None:
            raise EngineError("unavailable", "the server is shutting down")
        return self.fleet.capabilities

    async def hash_prompts(self, submissions: Sequence[Submission]) -> list[list[bytes]]:
        """The names of each submission's whole pages, for `generate`; long prompts are hashed in
        another thread."""
        capabilities = self.fleet.capabilities
        if capabilities is None:
            return [[] for _ in submissions]
        page_size, salt = capabilities.page_size, capabilities.hash_salt.encode()
        hashes: list[list[bytes]] = []
        for i, submission in enumerate(submissions):
            token_ids = submission.request.token_ids
            if i and token_ids is submissions[i - 1].request.token_ids:  # choices of one prompt
                hashes.append(hashes[-1])
            elif len(token_ids) <= _INLINE_TOKENS:
                hashes.append(page_hashes(token_ids, page_size, salt))
            else:
                hashes.append(await asyncio.to_thread(prompt_hashes, token_ids, page_size, salt))
        return hashes

    def generate(
        self,
        submissions: Sequence[Submission],
        route: str,
        hashes: Sequence[Sequence[bytes]] = (),
        traceparent: str = "",
    ) -> Generation:
        """Start all choices of one HTTP request. `route` is a label: a template, not a path;
        `hashes` come from `hash_prompts`, `traceparent` from the client. Raises EngineError where
        the queue is full, or while draining."""
        if self.is_draining:
            raise EngineError("unavailable", "the server is shutting down")
        num_tokens = sum(len(submission.request.token_ids) for submission in submissions)
        self._quota.take(len(submissions), num_tokens)
        generation = Generation(route, self._close_generation)
        now = time.perf_counter()
        for i, submission in enumerate(submissions):
            request = submission.request
            text = AnswerText(
                self._token_bytes,
                submission.stops,
                min_tokens=request.sampling.min_tokens,
                skip_special_tokens=submission.skip_special_tokens,
                continues=submission.continues,
            )
            span = self.tracer.start("request", traceparent)
            live = Live(request, Answer(submission.choice, text), generation, now, span)
            live.hashes = hashes[i] if hashes else ()
            self._live[request.rid] = live
            self._answers[request.rid] = live.answer
            generation.unfinished[request.rid] = live
            self._idle.clear()
            self._dispatch(live)
        self.metrics.prompt_tokens.inc(num_tokens)
        return generation

    def worker_exited(self, pid: int) -> None:
        """A process of this machine is gone: replay its requests elsewhere. Any thread."""

        def lose() -> None:
            worker = self.fleet.with_pid(pid)
            if worker is not None:
                self._lose(worker.address, "exited")

        if self._loop is not None:
            self._loop.call_soon_threadsafe(lose)

    def start_leaving(self) -> None:
        """Be ready no more, although what comes is served still."""
        self.is_leaving = True

    def start_draining(self) -> None:
        """Accept nothing new; what is unfinished goes on."""
        self.is_leaving = self.is_draining = True
        self._joined.set()  # whoever waits for workers is told

    async def drained(self) -> None:
        """Returns when nothing is unfinished."""
        await self._idle.wait()

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
        for address, event in events:
            self.fleet.heard(address)
            match event:
                case list():
                    for rid, delta in event:
                        live = self._live.get(rid)
                        if live is not None:
                            self._on_delta(live, address, delta, received_at)
                case Heartbeat():
                    self.fleet.beat(address, event)
                case Hello():
                    self._on_hello(address, event)
                case HandBack():
                    self._on_hand_back(address, event)
                case Goodbye():
                    self._lose(address, "ended")
                case Disconnected():
                    self._lose(address, "disconnected")

    def _on_hello(self, address: str, hello: Hello) -> None:
        if address not in self.addresses:  # it was still on its way when the address was removed
            self.router.index.drop(address)
            return
        self._lose(address, "replaced")
        same = self.fleet.with_instance(hello.instance_id)
        if same is not None:  # which now talks over this connection only
            logger.warning("%s and %s are one worker: name it once", same.address, address)
            self.remove_worker(same.address)
        if reason := self.fleet.misfit(hello):
            self.fleet.refused[address] = Refused(hello, reason)
            logger.error("%s worker at %s is refused: %s", hello.role, address, reason)
            return
        self._settle_model(hello.model_id)
        self.fleet.join(address, hello).is_retired = address in self._retired
        self.router.hints.clear(address)
        logger.info(
            "%s worker %s is ready (pid %d) at %s",
            hello.role,
            hello.instance_id,
            hello.pid,
            address,
        )
        self._on_joined()

    def _on_joined(self) -> None:
        """Somebody more takes requests."""
        if self.fleet.can_serve:
            self._joined.set()
        for live in list(self._parked.values()):
            self._dispatch(live)

    def _settle_model(self, model_id: ModelId) -> None:
        """Answers that another model has begun end here: no worker is left that could go on."""
        if self._model_id not in (None, model_id):
            message = f"the model was replaced: {self._model_id} by {model_id}"
            for live in [live for live in self._live.values() if live.answer.token_ids]:
                self._fail(live, EngineError("worker_lost", message))
        self._model_id = model_id

    def _take_refused(self) -> None:
        """Where no worker is left, those that were refused because of them may serve."""
        for address, refused in list(self.fleet.refused.items()):
            if not self.fleet.misfit(refused.hello):
                del self.fleet.refused[address]
                self._on_hello(address, refused.hello)

    def _forget_retired(self) -> None:
        for address in list(self._retired):
            worker = self.fleet.at(address)
            if worker is None or not worker.num_live:
                self.remove_worker(address)

    def _on_hand_back(self, address: str, message: HandBack) -> None:
        if message.is_overloaded:
            self.router.hints.mark(address)
        live = self._live.get(message.rid)
        if live is not None and live.answer.attempt == message.attempt:
            self._replay(live, message.reason, "handed_back")

    def _look(self) -> None:
        assert self._loop is not None
        self._looks = self._loop.call_later(LOOK_S, self._look)
        for worker in self.fleet.look():
            self._lose(worker.address, "silent")
            # Once it is back it has to say hello again.
            self._channel.post_hang_up(worker.address)
            self._channel.post_dial(worker.address)
        self._forget_retired()
        self._take_refused()

    def _on_delta(self, live: Live, address: str, delta: Delta, received_at: float) -> None:
        self._observe(live, delta, received_at)
        first = live.first
        if first is not None and first.address == address:
            first.live_tokens -= live.live_tokens
            live.live_tokens = 0
        elif first is not None:  # the decode worker speaks: the first one has done its part
            first.num_live -= 1
            live.first = None
        if delta.error:
            self._fail(live, EngineError("worker_error", delta.error))
            return
        live.generation.push(delta)
        if delta.finish_reason is not None:
            # The end of an earlier attempt may come while the next has begun.
            if live.answer.ended_early or live.answer.attempt:
                self._post_abort(live)
            self.metrics.e2e.observe(received_at - live.submitted_at)
            self._forget(live, delta.finish_reason)

    def _observe(self, live: Live, delta: Delta, received_at: float) -> None:
        if not delta.num_tokens:
            return
        metrics = self.metrics
        metrics.output_tokens.inc(delta.num_tokens)
        if live.last_token_at is None:
            metrics.ttft.observe(received_at - live.submitted_at)
            metrics.cached_tokens.inc(delta.cached_tokens)
            metrics.router_matched.inc(live.matched_tokens)
        else:
            each_s = (received_at - live.last_token_at) / delta.num_tokens
            for _ in range(delta.num_tokens):
                metrics.itl.observe(each_s)
        live.last_token_at = received_at

    def _dispatch(self, live: Live) -> None:
        """Give the request to workers, with the tokens so far, or park it until one joins."""
        request, answer = live.request, live.answer
        live.again = None
        num_tokens = len(request.token_ids) + len(answer.token_ids)
        choice = self.router.choose(
            num_tokens,
            live.hashes,
            needs_decode=request.sampling.max_tokens - len(answer.token_ids) > 1,
        )
        if choice is None:
            self._park(live)
            return
        self._unpark(live)
        live.first, live.decode = choice.first, choice.decode
        live.matched_tokens = choice.matched_tokens
        live.live_tokens = num_tokens - choice.matched_tokens
        live.first.live_tokens += live.live_tokens
        for worker in live.workers:
            worker.num_live += 1
            self.metrics.router_choices.labels(worker.hello.role).inc()
        route = None
        if live.decode is not None:
            route = Route(room=secrets.token_hex(16), prefill_address=live.first.address)
        submit = Submit(
            request, list(answer.token_ids), answer.attempt, route, live.span.traceparent
        )
        self._channel.post((live.decode or live.first).address, submit)

    def _park(self, live: Live) -> None:
        rid = live.request.rid
        if self._loop is not None and rid not in self._parked:
            self._parked[rid] = live
            live.give_up = self._loop.call_later(
                self.limits.worker_wait_s, self._fail, live, _no_worker()
            )
            self.metrics.num_parked = len(self._parked)

    def _lose(self, address: str, reason: Loss) -> None:
        self.fleet.refused.pop(address, None)
        worker = self.fleet.leave(address)
        if worker is None:
            return
        self.metrics.workers_lost.labels(worker.hello.role, reason).inc()
        how = _LOSSES[reason]
        lost = [live for live in self._live.values() if worker in live.workers]
        is_expected = self.is_draining and not lost
        logger.log(
            logging.INFO if is_expected else logging.WARNING,
            "%s worker %s at %s %s with %d requests",
            worker.hello.role,
            worker.hello.instance_id,
            address,
            how,
            len(lost),
        )
        for live in lost:
            self._replay(live, f"its {worker.hello.role} worker {how}", "lost")

    def _replay(self, live: Live, reason: str, kind: Literal["lost", "handed_back"]) -> None:
        """Go on elsewhere after the tokens so far; bounded where none comes in between."""
        # In this order: the answer to the abort is already one of an old attempt.
        live.answer.attempt += 1
        self._post_abort(live, live.answer.attempt - 1)
        self._release(live)
        num_known = len(live.answer.token_ids)
        if num_known > live.num_known:
            live.num_known, live.num_replays = num_known, 0
        if live.num_replays >= self.limits.max_replays:
            message = f"the request was lost {live.num_replays + 1} times, at last as {reason}"
            self._fail(live, EngineError("worker_lost", message))
            return
        live.num_replays += 1
        self.metrics.replays.labels(kind).inc()
        live.span.event("replay", {"plait.reason": reason})
        if live.num_replays == 1 or self._loop is None:
            self._dispatch(live)
        else:
            delay_s = min(_FIRST_DELAY_S * 2**live.num_replays, _MAX_DELAY_S)
            live.again = self._loop.call_later(delay_s, self._dispatch, live)

    def _close_generation(self, generation: Generation) -> None:
        for live in list(generation.unfinished.values()):
            self.metrics.aborts.inc()
            self._post_abort(live)
            self._forget(live, "abort")

    def _fail(self, live: Live, error: EngineError) -> None:
        self._post_abort(live)
        self._forget(live, "error", str(error))
        live.generation.fail(error)

    def _post_abort(self, live: Live, attempt: int | None = None) -> None:
        """Of this attempt and those before it; None: the present one."""
        abort = Abort(live.request.rid, live.answer.attempt if attempt is None else attempt)
        for worker in live.workers:
            if self.fleet.at(worker.address) is worker:
                self._channel.post(worker.address, abort)

    def _release(self, live: Live) -> None:
        """Its workers have nothing to do with it any more."""
        for worker in live.workers:
            worker.num_live -= 1
        if live.first is not None:
            live.first.live_tokens -= live.live_tokens
        live.first = live.decode = None
        live.live_tokens = 0

    def _unpark(self, live: Live) -> None:
        for timer in (live.give_up, live.again):
            if timer is not None:
                timer.cancel()
        live.give_up = live.again = None
        self._parked.pop(live.request.rid, None)
        self.metrics.num_parked = len(self._parked)

    def _forget(self, live: Live, how: str, error: str = "") -> None:
        """The one clean-up path of every request."""
        rid = live.request.rid
        if self._live.pop(rid, None) is None:
            return
        self._answers.pop(rid, None)
        self._unpark(live)
        live.generation.unfinished.pop(rid, None)
        self._release(live)
        self._quota.give_back(len(live.request.token_ids))
        self.metrics.requests.labels(live.generation.route, how).inc()
        live.end_span(how, error)
        if not self._live:
            self._idle.set()


def _no_worker() -> EngineError:
    return EngineError("unavailable", "no worker is ready to serve; try again later")
