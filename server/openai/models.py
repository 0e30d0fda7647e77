"""GET /v1/models and /v1/models/{id}. A model is listed while it is served: as /ready says."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from server.openai.api import Api
from server.openai.errors import overloaded


def listing(api: Api) -> Response:
    models = [_model(api)] if api.client.is_ready else []
    return _json({"object": "list", "data": models})


def retrieve(api: Api, name: str) -> Response:
    api.check_model(name)
    if not api.client.is_ready:
        raise overloaded(f"the model {name!r} is not ready to serve", "unavailable")
    return _json(_model(api))


def _model(api: Api) -> dict[str, Any]:
    capabilities = api.client.fleet.capabilities
    return {
        "id": api.config.model_name,
        "object": "model",
        "created": api.started_at,
        "owned_by": "plait",
        "max_model_len": capabilities.context_length if capabilities else None,
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
