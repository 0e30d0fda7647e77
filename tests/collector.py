"""An OpenTelemetry collector on a loopback port: takes spans as protobuf over HTTP, keeps them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ENDED_BADLY = 2  # the error status's number on the wire


@dataclass(frozen=True)
class Received:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    error: str | None  # None: it went well

    @property
    def ids(self) -> str:
        """What stands in the traceparent of its children between version and flags."""
        return f"{self.trace_id}-{self.span_id}"


class Collector:
    """`answer` is the status code of its answers."""

    def __init__(self) -> None:
        self.answer = 200
        self.paths: list[str] = []
        self.spans: list[Received] = []
        self.changed = threading.Condition()

    def wait_for(self, holds: Callable[[list[Received]], bool]) -> list[Received]:
        """Blocks until what has come says so; the test's timeout bounds it."""
        with self.changed:
            self.changed.wait_for(lambda: holds(self.spans))
            return list(self.spans)

    def named(self, name: str) -> Received:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.changed:
            self.paths.append(path)
            for part in request.resource_spans:
                service = _plain(part.resource.attributes)["service.name"]
                for scope in part.scope_spans:
                    self.spans += [_received(service, span) for span in scope.spans]
            self.changed.notify_all()


def _received(service: str, span: Any) -> Received:
    return Received(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        events=[(event.name, _plain(event.attributes)) for event in span.events],
        error=span.status.message if span.status.code == ENDED_BADLY else None,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector and its base URL."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.answer == 200:
                collector.take(self.path, body)
            self.send_response(collector.answer)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
