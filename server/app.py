"""The ASGI application: routes and middleware."""

from __future__ import annotations

from typing import get_args

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from engine.types import FinishReason
from server import health, status
from server.dispatch.client import EngineClient
from server.generation import EngineError, ErrorKind
from server.metrics import CONTENT_TYPE
from server.middleware import BodyLimit, KeyGuard, LastAnswer, RequestId
from server.openai import chat, completions, document, errors, models, tokenize
from server.openai.api import Api, from_engine
from server.options.config import ServeConfig
from server.options.loading import api_keys
from server.playground import page
from server.tokenizer import Tokenizer

PUBLIC_PATHS = frozenset({"/live", "/ready", "/health"})


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
    for kind in get_args(ErrorKind):
        error = from_engine(EngineError(kind, ""))
        client.metrics.errors.labels(error.kind, str(error.status))
    _add_routes(app, Api(config, client, tokenizer))
    document.describe(app)
    errors.install(app, count_error)
    public = PUBLIC_PATHS if config.metrics_need_key else PUBLIC_PATHS | {"/metrics"}
    if config.playground:
        page.add_routes(app)
        public |= page.FILES.keys()
    # Each is put around those before it: the last one is the outermost.
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, count_error=count_error)
    app.add_middleware(KeyGuard, keys=api_keys(config), public=public, count_error=count_error)
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
    @app.head("/live", include_in_schema=False)
    async def live() -> Response:
        return health.live()

    @app.get("/ready")
    @app.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        return health.ready(client)

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health_of_all() -> Response:
        return health.health(client)

    @app.get("/status")
    async def fleet_status() -> Response:
        return status.answer(client)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(client.metrics.expose(), media_type=CONTENT_TYPE)
