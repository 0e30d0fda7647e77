"""One log format for the front end's process. Owns handlers and levels; knows no routes."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

# Set by the HTTP middleware; "-" outside of a request.
request_id: ContextVar[str] = ContextVar("request_id", default="-")

FORMAT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
QUIET = ("uvicorn.error", "httpcore", "httpx", "filelock", "urllib3", "asyncio")


class _AddRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def configure(level: str) -> None:
    """Send every logger's records of `level` and above to stderr, in one format.

    Libraries' own loggers speak from warning on, unless the level is debug.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(_AddRequestId())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level != "debug":
        for name in QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)
