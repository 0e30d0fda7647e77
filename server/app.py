"""The ASGI application: routes and middleware."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from engine.types import FinishReason
from server import health, status
from server.client import EngineClient
from server.config import ServeConfig
from server.metrics import CONTENT_TYPE
from server.middleware import BodyLimit, KeyGuard, LastAnswer, RequestId
from server.openai import chat, completions, errors, models, tokenize
from server.openai.api import Api
from server.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from server.playground import page
from server.tokenizer import Tokenizer

PUBLIC_PATHS = frozenset({"/live", "/ready", "/health"})

_BODIES: dict[str, type[BaseModel]] = {
    chat.ROUTE: ChatCompletionRequest,
    completions.ROUTE: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def create_app(config: ServeConfig, client: EngineClient, tokenizer: Tokenizer) -> FastAPI:
    """Whoever made `client` starts it on the application's event loop and closes both.

    Raises ConfigError where the API key file cannot be used.
    """
    app = FastAPI(
        title="plait",
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )

    def count_error(error: errors.APIError) -> None:
        client.metrics.errors.labels(error.kind, str(error.status)).inc()

    # From zero on: a counter whose first sample is 1 has no growth that a query could see.
    for route in (chat.ROUTE, completions.ROUTE):
        for reason in get_args(FinishReason):
            client.metrics.requests.labels(route, reason)
    _add_routes(app, Api(config, client, tokenizer))
    _describe_bodies(app)
    errors.install(app, count_error)
    public = PUBLIC_PATHS if config.metrics_need_key else PUBLIC_PATHS | {"/metrics"}
    if config.playground:
        page.add_routes(app)
        public |= page.FILES.keys()
    # Each is put around those before it: the last one is the outermost.
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, count_error=count_error)
    app.add_middleware(KeyGuard, keys=config.api_keys(), public=public, count_error=count_error)
    if config.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestId, count_error=count_error)
    app.add_middleware(LastAnswer, is_leaving=lambda: client.is_leaving)
    return app


def _add_routes(app: FastAPI, api: Api) -> None:
    client = api.client

    @app.post(chat.ROUTE)
    async def create_chat_completion(request: Request) -> Response:
        return await chat.create(api, request)

    @app.post(completions.ROUTE)
    async def create_completion(request: Request) -> Response:
        return await completions.create(api, request)

    @app.get("/v1/models")
    async def list_models() -> Response:
        return models.listing(api)

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        return models.retrieve(api, name)

    @app.post("/tokenize")
    async def tokenize_text(request: Request) -> Response:
        return await tokenize.tokenize(api, request)

    @app.post("/detokenize")
    async def detokenize_ids(request: Request) -> Response:
        return await tokenize.detokenize(api, request)

    @app.get("/live")
    async def live() -> Response:
        return health.live()

    @app.get("/ready")
    async def ready() -> Response:
        return health.ready(client)

    @app.get("/health")
    async def health_of_all() -> Response:
        return health.health(client)

    @app.get("/status")
    async def fleet_status() -> Response:
        return status.answer(client)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(client.metrics.expose(), media_type=CONTENT_TYPE)


def _describe_bodies(app: FastAPI) -> None:
    """Routes read their bodies themselves, so the OpenAPI document is told of them here."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = original()
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
            document["paths"]["/v1/models/{name}"]["get"]["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                components.pop(name, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
