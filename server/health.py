"""Three probes that mean three things: the process runs, it takes requests, how it is."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from server.dispatch.client import EngineClient
from server.openai.errors import RETRY_AFTER_S


def live() -> Response:
    """200 while the process runs: failing it means restart me."""
    return _answer(200, {"status": "ok"})


def ready(client: EngineClient) -> Response:
    """200 while new requests are served: failing it means send me none."""
    return _answer(200 if client.is_ready else 503, {"status": state(client)})


def health(client: EngineClient) -> Response:
    """200 while a worker is there, draining or not, with numbers for people."""
    workers = [
        {
            "role": worker.hello.role,
            "requests_running": worker.load.num_running,
            "requests_waiting": worker.load.num_waiting,
        }
        for worker in client.fleet
    ]
    return _answer(200 if workers else 503, {"status": state(client), "workers": workers})


def state(client: EngineClient) -> str:
    """In a word or a few: does it serve?"""
    if client.is_leaving:
        return "draining"
    return "ok" if client.is_ready else "no worker is ready"


def _answer(status: int, value: object) -> Response:
    headers = {"Cache-Control": "no-store"}
    if status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return Response(
        msgspec.json.encode(value), status, headers=headers, media_type="application/json"
    )
