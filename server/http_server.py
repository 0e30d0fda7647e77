"""The HTTP server's socket, limits and end. Knows no route."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

# Of a request's line and headers together; more is answered 400 and the connection closed.
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 65  # longer than clients' and proxies' pools keep an idle connection
ANSWER_GRACE_S = 5  # for the last bytes of answers after the drain


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: who starts it drains first."""

    def __init__(self, app: ASGIApp, *, access_log: bool = False) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=ANSWER_GRACE_S,
                log_config=None,
                access_log=access_log,
                server_header=False,
                proxy_headers=False,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def close_idle(self) -> None:
        """Close connections between two requests, and the others after their answer. New ones are
        accepted still."""
        for connection in list(self.server_state.connections):
            connection.shutdown()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket: a port that is taken shows before a model is loaded. Raises OSError."""
    where = f"--host {host} --port {port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:
        raise OSError(f"{where}: {error}; expected an address of this machine") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        raise OSError(
            f"{where}: {os.strerror(error.errno or 0) if isinstance(error, OSError) else error};"
            " expected a free port of this machine (0 picks one)"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where this machine reaches the server; a wildcard address is shown as loopback."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
