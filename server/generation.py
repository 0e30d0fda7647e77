"""A generation as a route sees it: what is asked, the deltas as they come, why it failed.

Owned by the event loop. Knows no worker, no socket and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.types import Request
from server.answer import Delta

ErrorKind = Literal["overloaded", "unavailable", "worker_lost", "worker_error"]

NO_WORKER = "no worker is ready to serve; try again later"


class EngineError(Exception):
    """Why a generation cannot start or go on; the message is meant for the client."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


@dataclass(frozen=True, slots=True)
class Limits:
    max_replays: int = 4  # in a row, without a token in between
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


class Generation:
    """The deltas of some choices as they come, in batches. Iterate it to its end or `close` it;
    closing aborts what is unfinished. Raises EngineError where a choice fails."""

    def __init__(self, route: str, on_close: Callable[[Generation], None]) -> None:
        self.route = route
        self.unfinished: dict[str, None] = {}  # rids of the choices that go on
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


class Quota:
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
