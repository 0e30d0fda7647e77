"""Runs a generation for a route: one JSON body, or a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.answer import Delta
from server.generation import EngineError, Generation, Submission
from server.openai.api import Api, from_engine
from server.openai.errors import APIError
from server.openai.sse import Chunks, ClientGone, EventStream, while_connected
from server.openai.usage import Usage
from server.router.prompt_hashes import hash_prompts

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the access log does


class Answer(Chunks, Protocol):
    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The whole answer from all its deltas."""
        ...


async def respond(
    api: Api,
    request: Request,
    submissions: Sequence[Submission],
    route: str,
    answer: Answer,
    usage: Usage,
    as_stream: bool,
) -> Response:
    """Raises APIError where nothing was sent yet. A client that leaves aborts all choices."""

    def count_error(error: APIError) -> None:
        api.client.metrics.errors.labels(error.kind, str(error.status)).inc()

    try:
        prompts = [submission.request.token_ids for submission in submissions]
        hashes = await hash_prompts(prompts, api.client.fleet.capabilities)
        generation = api.client.requests.begin(
            submissions, route, hashes, request.headers.get("traceparent", "")
        )
    except EngineError as error:
        raise from_engine(error) from error
    is_handed_on = False
    try:
        if not as_stream:
            deltas = await while_connected(request, _all(generation))
            for delta in deltas:
                usage.add(delta)
            return Response(msgspec.json.encode(answer.body(deltas)), media_type="application/json")
        first = await while_connected(request, _first(generation))
        is_handed_on = True
        return EventStream(first, generation, answer, usage, count_error)
    except EngineError as error:
        raise from_engine(error) from error
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        if not is_handed_on:
            generation.close()


async def _first(generation: Generation) -> list[Delta]:
    return await anext(generation)


async def _all(generation: Generation) -> list[Delta]:
    return [delta async for deltas in generation for delta in deltas]
