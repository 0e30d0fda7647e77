"""The unfinished requests of this front end: begun, advanced by what workers say, ended.

Owned by the event loop. Knows no socket and no HTTP; workers only as the fleet's entries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from engine.channel import Channel
from engine.messages import HandBack
from engine.tracing import Tracer
from engine.types import ModelId
from server.answer import Answer, Delta
from server.detokenizer import AnswerText, TokenBytes
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.fleet import Worker
from server.dispatch.live import Live
from server.generation import EngineError, Generation, Limits, Quota, Submission
from server.metrics import Metrics
from server.router.router import Router


class Requests:
    def __init__(
        self,
        token_bytes: TokenBytes,
        limits: Limits,
        tracer: Tracer,
        channel: Channel,
        router: Router,
        metrics: Metrics,
    ) -> None:
        self.answers: dict[str, Answer] = {}  # by rid, for the reader thread
        self.is_draining = False  # new ones are refused
        self._live: dict[str, Live] = {}  # by rid
        self._token_bytes = token_bytes
        self._tracer = tracer
        self._metrics = metrics
        self._quota = Quota(limits)
        self._model_id: ModelId | None = None  # of the workers that are there, or were
        self._dispatcher = Dispatcher(channel, router, metrics, limits, self._fail)
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def begin(
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
        generation = Generation(route, self._close)
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
            span = self._tracer.start("request", traceparent)
            live = Live(request, Answer(submission.choice, text), generation, now, span)
            live.hashes = hashes[i] if hashes else ()
            self._live[request.rid] = live
            self.answers[request.rid] = live.answer
            generation.unfinished[request.rid] = None
            self._idle.clear()
            self._dispatcher.give(live)
        self._metrics.prompt_tokens.inc(num_tokens)
        return generation

    def settle_model(self, model_id: ModelId) -> None:
        """Workers of this model join. Answers that another has begun end here: no worker is left
        that could go on."""
        if self._model_id not in (None, model_id):
            message = f"the model was replaced: {self._model_id} by {model_id}"
            for live in [live for live in self._live.values() if live.answer.token_ids]:
                self._fail(live, EngineError("worker_lost", message))
        self._model_id = model_id

    def worker_joined(self) -> None:
        """Somebody more takes requests."""
        self._dispatcher.give_parked()

    def worker_lost(self, worker: Worker, how: str, *, said_goodbye: bool) -> None:
        """It left the fleet: what it had goes on elsewhere, but for what it has handed over before
        its goodbye."""
        reason = f"its {worker.hello.role} worker {how}"
        for live in [live for live in self._live.values() if worker in live.workers]:
            if said_goodbye and live.is_handed_over_by(worker):
                live.forget_first()
            else:
                self._dispatcher.replay(live, reason, "handed_back" if said_goodbye else "lost")

    def handed_back(self, message: HandBack) -> None:
        """A worker cannot go on with a request."""
        live = self._live.get(message.rid)
        if live is not None and live.answer.attempt == message.attempt:
            self._dispatcher.replay(live, message.reason, "handed_back")

    def advance(
        self, address: str, deltas: Sequence[tuple[str, Delta]], received_at: float
    ) -> None:
        """By what the worker at this address has said, as (rid, delta)."""
        for rid, delta in deltas:
            live = self._live.get(rid)
            if live is not None:
                self._on_delta(live, address, delta, received_at)

    def fail_all(self, message: str) -> None:
        """End each with an error that says `message`."""
        for live in list(self._live.values()):
            self._fail(live, EngineError("unavailable", message))

    async def all_ended(self) -> None:
        """Returns when nothing is unfinished."""
        await self._idle.wait()

    def _on_delta(self, live: Live, address: str, delta: Delta, received_at: float) -> None:
        self._observe(live, delta, received_at)
        if delta.attempt == live.answer.attempt:
            live.heard_from(address)
        if delta.error:
            self._fail(live, EngineError("worker_error", delta.error))
            return
        live.generation.push(delta)
        if delta.finish_reason is not None:
            # The end of an earlier attempt may come while the next has begun.
            if live.answer.ended_early or live.answer.attempt:
                self._dispatcher.abort(live)
            self._metrics.e2e.observe(received_at - live.submitted_at)
            self._forget(live, delta.finish_reason)

    def _observe(self, live: Live, delta: Delta, received_at: float) -> None:
        if not delta.num_tokens:
            return
        metrics = self._metrics
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

    def _close(self, generation: Generation) -> None:
        for rid in list(generation.unfinished):
            live = self._live[rid]
            self._metrics.aborts.inc()
            self._dispatcher.abort(live)
            self._forget(live, "abort")

    def _fail(self, live: Live, error: EngineError) -> None:
        self._dispatcher.abort(live)
        self._forget(live, "error", str(error))
        live.generation.fail(error)

    def _forget(self, live: Live, how: str, error: str = "") -> None:
        """The one clean-up path of every request."""
        rid = live.request.rid
        if self._live.pop(rid, None) is None:
            return
        self.answers.pop(rid, None)
        self._dispatcher.drop(live)
        live.generation.unfinished.pop(rid, None)
        self._quota.give_back(len(live.request.token_ids))
        self._metrics.requests.labels(live.generation.route, how).inc()
        live.end_span(how, error)
        if not self._live:
            self._idle.set()
