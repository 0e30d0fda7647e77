"""The one shape of every error, as OpenAI clients read it.

Owns status, type and code of what can go wrong. Knows no route.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

# Names that pydantic gives to the branches of a union, and what is said of such fields instead.
_BRANCHES = frozenset({"str", "int", "float", "bool"})
_ACCEPTED = {
    "stop": "accepted is a string or a list of strings",
    "content": "accepted is a string or a list of content parts",
}


class APIError(Exception):
    """An answer that is an error. `kind` is its bounded name in the metrics.

    Clients retry 408, 409, 429 and 5xx, so what can never succeed must be another 4xx.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        return self.code or _type_of(self.status)

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def _type_of(status: int) -> str:
    default = "invalid_request_error" if status < 500 else "server_error"
    return _TYPES.get(status, default)


def invalid(param: str, message: str) -> APIError:
    """A 400 for one field of the request."""
    return APIError(message, param=param, code="invalid_value")


def unsupported(param: str, more: str = "") -> APIError:
    """400: the field is known, what it asks for is not done here."""
    return APIError(f"{param} is not supported{more}", param=param, code="unsupported_parameter")


def overloaded(message: str, code: str = "overloaded") -> APIError:
    return APIError(message, status=503, code=code, retry_after_s=RETRY_AFTER_S)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """pydantic's first complaint as one sentence about one field, named as clients wrote it."""
    first = errors[0]
    # A union names its branch in capitals or with brackets; clients never wrote that.
    loc = [part for part in first["loc"] if isinstance(part, int) or _is_field(part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    param = param.removeprefix(".")
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return APIError(f"{param} is required", param=param, code="missing_required_parameter")
    message = _ACCEPTED.get(str(loc[-1]) if loc else "") or message[:1].lower() + message[1:]
    given = _shorten(first.get("input"))
    return APIError(
        f"{param or 'the body'} is {given}: {message}",
        param=param or None,
        code="invalid_type" if first["type"].endswith("_type") else "invalid_value",
    )


def _is_field(part: object) -> bool:
    return isinstance(part, str) and part.isidentifier() and part not in _BRANCHES


def _shorten(value: object, limit: int = 80) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"a list of {len(value)}"
    try:  # JSON has no word for what is not finite
        text = repr(value) if isinstance(value, float) else msgspec.json.encode(value).decode()
    except (TypeError, ValueError, UnicodeEncodeError):
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def error_response(error: APIError, headers: Mapping[str, str] | None = None) -> Response:
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        all_headers["WWW-Authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(error.body()),
        status_code=error.status,
        headers=all_headers,
        media_type="application/json",
    )


def from_http(error: HTTPException, method: str, path: str) -> APIError:
    """What the framework itself refuses: no such route, no such method, a body cut off."""
    if error.status_code == 404:
        return APIError(f"there is no route {path}", status=404, code="not_found")
    if error.status_code == 405:
        message = f"{method} is not allowed on {path}"
        return APIError(message, status=405, code="method_not_allowed")
    return APIError(str(error.detail), status=error.status_code)


def _methods_of_path(app: FastAPI, scope: Scope) -> list[str]:
    """Of all its routes: the framework tells those of the first one."""
    methods: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(scope)[0] is Match.PARTIAL:
            methods |= route.methods or set()
    return sorted(methods)


def install(app: FastAPI, count_error: Callable[[APIError], None]) -> None:
    """Every error that leaves a route has the one shape. (What nobody foresaw is answered by the
    outermost middleware.) `count_error` is told of it."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        count_error(error)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        api_error = from_http(error, request.method, request.url.path)
        count_error(api_error)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods_of_path(app, request.scope))
        return error_response(api_error, headers)

    app.add_exception_handler(APIError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
