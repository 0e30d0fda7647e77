"""What every request passes before a route sees it: an id, the key, the size of its body.

Thin ASGI, outermost first: LastAnswer, RequestId, (CORS,) KeyGuard, BodyLimit. Knows no route's
meaning.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Callable, Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import logs
from server.openai.errors import APIError, error_response

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

CountError = Callable[[APIError], None]


class RequestId:
    """Accepts x-request-id, or makes one, and returns it with every answer, also with the 500 that
    stands for an exception nobody foresaw."""

    def __init__(self, app: ASGIApp, count_error: CountError) -> None:
        self._app = app
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        logs.request_id.set(request_id)
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            error = APIError("internal error", status=500, code="internal_error")
            self._count_error(error)
            if has_started:
                raise
            await error_response(error)(scope, receive, send_with_id)


class LastAnswer:
    """While the server leaves, every answer is the last of its connection: the client's next one
    is made elsewhere."""

    def __init__(self, app: ASGIApp, is_leaving: Callable[[], bool]) -> None:
        self._app = app
        self._is_leaving = is_leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_leaving():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_last)


class KeyGuard:
    """Everything needs a key, except `public` paths. Without keys everything is open."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        public: Collection[str],
        count_error: CountError,
    ) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._public = frozenset(public)
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = not self._digests or scope["type"] == "lifespan"
        if is_open or scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_key(key.strip()):
            await self._app(scope, receive, send)
            return
        error = APIError(
            "an API key is needed: send it as 'Authorization: Bearer KEY'"
            if not key
            else "the API key is not one of this server's",
            status=401,
            code="invalid_api_key",
        )
        self._count_error(error)
        await error_response(error)(scope, receive, send)

    def _is_key(self, key: str) -> bool:
        # Digests are equally long, and all are compared: time says nothing about any key.
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class BodyLimit:
    """Refuses bodies above `max_bytes`: by their announced length, or when they get there."""

    def __init__(self, app: ASGIApp, max_bytes: int, count_error: CountError) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            error = self._too_large(f"{announced} bytes")
            self._count_error(error)
            await error_response(error)(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large(f"more than {num_bytes - 1} bytes")
            return message

        await self._app(scope, receive_counted, send)

    def _too_large(self, size: str) -> APIError:
        return APIError(
            f"the body has {size}: at most {self._max_bytes} are accepted",
            status=413,
            code="request_too_large",
        )
