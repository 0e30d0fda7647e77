"""Server-sent events: chunks of a generation until its end, an error, or the client's leaving.

Owns order and framing. What a chunk says is the routes' part.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.answer import Delta
from server.generation import EngineError, Generation
from server.openai.api import from_engine
from server.openai.errors import APIError
from server.openai.usage import Usage

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect events
}


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: then raises ClientGone."""
    return await _unless_gone(request.receive, work)


async def _unless_gone(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Chunks(Protocol):
    """What a route writes, ready to send. Each method may return nothing."""

    def opening(self, deltas: Sequence[Delta]) -> bytes | None:
        """Before all else, choice 0 first. None while it needs more than `deltas`, which are all
        that came so far."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def finish(self, delta: Delta) -> bytes: ...

    def closing(self) -> bytes:
        """After the last choice's finish: usage, where asked for."""
        ...


class EventStream(Response):
    """Sent once the first deltas are there, so that an early failure still has a real status."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: list[Delta],
        generation: Generation,
        chunks: Chunks,
        usage: Usage,
        count_error: Callable[[APIError], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._first = first
        self._generation = generation
        self._chunks = chunks
        self._usage = usage
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            last = self._chunks.closing() + DONE
        except EngineError as engine_error:
            error = from_engine(engine_error)
            self._count_error(error)
            last = event(error.body()) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        """One piece of bytes for each batch of deltas."""
        chunks = self._chunks
        waiting = self._first
        opening = chunks.opening(waiting)
        while opening is None:
            waiting = [*waiting, *(await anext(self._generation))]
            opening = chunks.opening(waiting)
        yield opening + self._write(waiting)
        async for deltas in self._generation:
            yield self._write(deltas)

    def _write(self, deltas: Sequence[Delta]) -> bytes:
        pieces = []
        for delta in deltas:
            self._usage.add(delta)
            if delta.text or delta.logprobs:
                pieces.append(self._chunks.delta(delta))
            if delta.finish_reason is not None:
                pieces.append(self._chunks.finish(delta))
        return b"".join(pieces)
