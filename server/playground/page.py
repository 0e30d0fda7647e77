"""The chat page at `/`: three files of this folder, served with a policy that lets them load
nothing and talk to nobody but this server. Knows nothing of what the page asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# By path: the file and its type. These paths, and no others of the page, need no API key.
FILES = {
    "/": ("index.html", "text/html"),
    "/playground/style.css": ("style.css", "text/css"),
    "/playground/app.js": ("app.js", "text/javascript"),
}


def add_routes(app: FastAPI) -> None:
    for path, (name, media_type) in FILES.items():
        answer = _file(FOLDER / name, media_type)
        app.add_route(path, answer, methods=["GET"], include_in_schema=False)


def _file(path: Path, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = path.read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return answer
