"""The OpenAPI document at /openapi.json: what the framework cannot see, since routes read their
bodies and write their answers themselves. Knows schemas and routes; no request."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.openai import chat, completions
from server.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_BODIES: dict[str, type[BaseModel]] = {
    chat.ROUTE: ChatCompletionRequest,
    completions.ROUTE: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_STREAMED = (chat.ROUTE, completions.ROUTE)
_PROBES = ("/ready", "/health")  # they say 503 in words of their own
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(app: FastAPI) -> None:
    """Make `app.openapi` tell of bodies, errors and content types."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = original()
            _add_bodies(document)
            _add_answers(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_bodies(document: dict[str, Any]) -> None:
    kinds, definitions = models_json_schema(
        [(kind, "validation") for kind in _BODIES.values()],
        ref_template="#/components/schemas/{model}",
    )
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(definitions["$defs"])
    for path, kind in _BODIES.items():
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": kinds[kind, "validation"]}},
        }
    # The framework's own validation error: no route answers with it.
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)


def _add_answers(document: dict[str, Any]) -> None:
    document["components"]["schemas"]["Error"] = _ERROR
    error = _content("application/json", {"$ref": "#/components/schemas/Error"})
    for path, methods in document["paths"].items():
        for operation in methods.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["4XX"] = {"description": "An error in the request, or no key", **error}
            responses["5XX"] = {"description": "Overloaded, not ready, or broken", **error}
            if path in _PROBES:
                responses["503"] = responses["200"] | {"description": "Not now"}
            if path in _STREAMED:
                responses["200"]["content"] |= {"text/event-stream": {"schema": {"type": "string"}}}
            if path == "/metrics":
                responses["200"] |= _content("text/plain", {"type": "string"})


def _content(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}
