"""Gives requests to workers, parks them where none can take them, replays them where one is lost.

Owned by the event loop. Knows neither where a request came from nor what becomes of its answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Literal

from engine.channel import Channel
from engine.messages import Abort, Route, Submit
from server.dispatch.live import Live
from server.generation import NO_WORKER, EngineError, Limits
from server.metrics import Metrics
from server.router.router import Router

_FIRST_DELAY_S = 0.05  # before a request that was handed back is tried again
_MAX_DELAY_S = 2.0


class Dispatcher:
    """`fail` is called, with the reason, where a request cannot go on."""

    def __init__(
        self,
        channel: Channel,
        router: Router,
        metrics: Metrics,
        limits: Limits,
        fail: Callable[[Live, EngineError], None],
    ) -> None:
        self._channel = channel
        self._router = router
        self._metrics = metrics
        self._limits = limits
        self._fail = fail
        self._parked: dict[str, Live] = {}  # those that wait for a worker, oldest first

    def give(self, live: Live) -> None:
        """To workers, with the tokens so far, or park it until one joins."""
        request, answer = live.request, live.answer
        live.again = None
        choice = self._router.choose(
            live.num_tokens,
            live.hashes,
            needs_decode=request.sampling.max_tokens - len(answer.token_ids) > 1,
        )
        if choice is None:
            self._park(live)
            return
        self._unpark(live)
        live.give(choice)
        for worker in live.workers:
            self._metrics.router_choices.labels(worker.hello.role).inc()
        route = None
        if choice.decode is not None:
            route = Route(room=secrets.token_hex(16), prefill_address=choice.first.address)
        submit = Submit(
            request, list(answer.token_ids), answer.attempt, route, live.span.traceparent
        )
        self._channel.post((choice.decode or choice.first).address, submit)

    def give_parked(self) -> None:
        """Somebody more takes requests."""
        for live in list(self._parked.values()):
            self.give(live)

    def replay(self, live: Live, reason: str, kind: Literal["lost", "handed_back"]) -> None:
        """Go on elsewhere after the tokens so far; bounded where none comes in between."""
        # In this order: the answer to the abort is already one of an old attempt.
        live.answer.attempt += 1
        self.abort(live, live.answer.attempt - 1)
        live.release()
        num_known = len(live.answer.token_ids)
        if num_known > live.num_known:
            live.num_known, live.num_replays = num_known, 0
        if live.num_replays >= self._limits.max_replays:
            message = f"the request was lost {live.num_replays + 1} times, at last as {reason}"
            self._fail(live, EngineError("worker_lost", message))
            return
        live.num_replays += 1
        self._metrics.replays.labels(kind).inc()
        live.span.event("replay", {"plait.reason": reason})
        if live.num_replays == 1:
            self.give(live)
        else:
            delay_s = min(_FIRST_DELAY_S * 2**live.num_replays, _MAX_DELAY_S)
            live.again = asyncio.get_running_loop().call_later(delay_s, self.give, live)

    def abort(self, live: Live, attempt: int | None = None) -> None:
        """Tell its workers that this attempt and those before it are over; None: the present
        one."""
        message = Abort(live.request.rid, live.answer.attempt if attempt is None else attempt)
        for worker in live.workers:  # also one that is lost: its successor may have been given it
            self._channel.post(worker.address, message)

    def drop(self, live: Live) -> None:
        """It has ended: it waits for no worker, and none has it."""
        self._unpark(live)
        live.release()

    def _park(self, live: Live) -> None:
        rid = live.request.rid
        if rid not in self._parked:
            self._parked[rid] = live
            live.give_up = asyncio.get_running_loop().call_later(
                self._limits.worker_wait_s,
                self._fail,
                live,
                EngineError("unavailable", NO_WORKER),
            )
            self._metrics.num_parked = len(self._parked)

    def _unpark(self, live: Live) -> None:
        live.cancel_timers()
        self._parked.pop(live.request.rid, None)
        self._metrics.num_parked = len(self._parked)
