"""An unfinished request: how far it is, and which workers have it.

Owned by the event loop, but for the answer, which the reader thread writes. Knows no socket and no
other request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from engine.tracing import Attributes, Span
from engine.types import Request
from server.answer import Answer
from server.dispatch.fleet import Worker
from server.generation import Generation
from server.router.router import Choice


@dataclass(slots=True, eq=False)
class Live:
    request: Request
    answer: Answer
    generation: Generation
    submitted_at: float
    span: Span  # `request`, of the trace
    hashes: Sequence[bytes] = ()  # of the prompt's whole pages
    first: Worker | None = None  # computes the prompt, or all of it; None once that is done
    decode: Worker | None = None  # goes on after the first token
    is_prefilled: bool = False  # `first` has said its token
    live_tokens: int = 0  # counted at `first` until the first token is there
    matched_tokens: int = 0  # that the router thought cached at `first`
    num_replays: int = 0  # since a token came last
    num_known: int = 0  # tokens that were there at the last replay
    last_token_at: float | None = None
    give_up: asyncio.TimerHandle | None = None
    again: asyncio.TimerHandle | None = None

    @property
    def workers(self) -> list[Worker]:
        """Those that have something of it."""
        return [worker for worker in (self.first, self.decode) if worker is not None]

    @property
    def num_tokens(self) -> int:
        """Of the prompt and of the answer so far: what a worker has to compute or find cached."""
        return len(self.request.token_ids) + len(self.answer.token_ids)

    def give(self, choice: Choice) -> None:
        """These workers have it from now on."""
        self.first, self.decode = choice.first, choice.decode
        self.is_prefilled = False
        self.matched_tokens = choice.matched_tokens
        self.live_tokens = self.num_tokens - choice.matched_tokens
        self.first.live_tokens += self.live_tokens
        for worker in self.workers:
            worker.num_live += 1

    def heard_from(self, address: str) -> None:
        """A token of this attempt came from there, so the prompt is computed."""
        if self.first is None:
            return
        if self.first.address == address:
            self.is_prefilled = True
            self._give_back_load()
        else:  # the decode worker speaks
            self.forget_first()

    def is_handed_over_by(self, worker: Worker) -> bool:
        """Of one that says goodbye: the prompt is computed there and on its way to the decode
        worker, which would hand the request back if it did not arrive."""
        return self.first is worker and self.is_prefilled and self.decode is not None

    def forget_first(self) -> None:
        """It has done its part."""
        self._give_back_load()
        if self.first is not None:
            self.first.num_live -= 1
        self.first = None

    def release(self) -> None:
        """Its workers have nothing to do with it any more."""
        self.forget_first()
        if self.decode is not None:
            self.decode.num_live -= 1
        self.decode = None

    def _give_back_load(self) -> None:
        if self.first is not None:
            self.first.live_tokens -= self.live_tokens
        self.live_tokens = 0

    def cancel_timers(self) -> None:
        for timer in (self.give_up, self.again):
            if timer is not None:
                timer.cancel()
        self.give_up = self.again = None

    def end_span(self, how: str, error: str) -> None:
        """The request has ended with this finish reason. Names of attributes are OpenTelemetry's
        conventions for generative AI, where they have one."""
        attributes: Attributes = {
            "plait.rid": self.request.rid,
            "plait.replays": self.answer.attempt,
            "gen_ai.usage.input_tokens": len(self.request.token_ids),
            "gen_ai.usage.output_tokens": len(self.answer.token_ids),
            "gen_ai.response.finish_reasons": [how],
            "http.route": self.generation.route,
        }
        self.span.end(attributes, error)
