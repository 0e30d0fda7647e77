"""Spans of requests, for a collector that speaks OTLP over HTTP.

Owns the one export queue of this process. OpenTelemetry is imported only where there is an address
to send to; nothing here waits for that address. Knows no request.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger("plait.tracing")

CLOSE_S = 2.0  # for the last spans of a process that ends; then they are dropped

Attributes: TypeAlias = "Mapping[str, str | int | float | bool | Sequence[str]]"


class Span(Protocol):
    """Under way until `end`, which is called once."""

    @property
    def traceparent(self) -> str:
        """What its children name as their parent, as in W3C Trace Context; empty: no trace."""
        ...

    def event(self, name: str, attributes: Attributes) -> None:
        """Something that happens now."""
        ...

    def end(self, attributes: Attributes, error: str = "") -> None: ...


class Tracer(Protocol):
    def start(self, name: str, parent: str) -> Span:
        """A span that begins now. `parent` is a traceparent; with one that is empty or malformed a
        new trace begins."""
        ...

    def write(
        self,
        name: str,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """A span that is over; times are time.monotonic's. Nothing without a parent."""
        ...

    def close(self) -> None:
        """Send what is left; takes CLOSE_S at most."""
        ...


class _NoSpan:
    traceparent = ""

    def event(self, name: str, attributes: Attributes) -> None:
        pass

    def end(self, attributes: Attributes, error: str = "") -> None:
        pass


class NoTracer:
    def start(self, name: str, parent: str) -> Span:
        return _NO_SPAN

    def write(
        self,
        name: str,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        pass

    def close(self) -> None:
        pass


_NO_SPAN = _NoSpan()
NO_TRACER = NoTracer()


def traces_url(endpoint: str | None) -> str | None:
    """Where spans are posted: at `endpoint`, a collector's base URL, else where the standard
    OTEL_EXPORTER_OTLP_ variables say; None where nothing says so."""
    if endpoint is None and (whole := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return whole
    base = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not base:
        return None
    base = base.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def open_tracer(
    url: str | None, *, service: str, instance: str, common: Attributes | None = None
) -> Tracer:
    """`url` is what `traces_url` gave; without one nothing is traced. `common` goes on every span.
    What else OpenTelemetry's variables set (headers, certificates, sampler, batches, resource) it
    reads itself. A tracer that cannot be made is logged and does not stop the server."""
    if url is None:
        return NO_TRACER
    try:
        return OtlpTracer(url, service, instance, common or {})
    except Exception as error:
        log.warning("no traces: %s: %s", type(error).__name__, error)
        return NO_TRACER


class OtlpTracer:
    """Spans wait in a bounded queue for a thread that sends them; a full queue loses them."""

    def __init__(self, url: str, service: str, instance: str, common: Attributes) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # An endpoint that is down would be told of with every batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        names = {"service.namespace": "plait", "service.instance.id": instance}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            names["service.name"] = service
        # Not set as the process's provider: libraries that trace would then trace here too.
        self._provider: TracerProvider = TracerProvider(
            resource=Resource.create(names), shutdown_on_exit=False
        )
        exporter = _complaining_once(OTLPSpanExporter(endpoint=url), url)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("plait")
        self._propagator = TraceContextTextMapPropagator()
        self._common = dict(common)
        log.info("traces go to %s", url)

    def start(self, name: str, parent: str) -> Span:
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            name, self._context(parent), kind=SpanKind.SERVER, attributes=self._common
        )
        return _OpenSpan(span, self._traceparent(span))

    def write(
        self,
        name: str,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        if not parent:
            return
        zero_ns = time.time_ns() - int(time.monotonic() * 1e9)
        span = self._tracer.start_span(
            name,
            self._context(parent),
            attributes=self._common,
            start_time=zero_ns + int(start_s * 1e9),
        )
        _finish(span, attributes, error, zero_ns + int(end_s * 1e9))

    def flush(self) -> None:
        """Returns when all that was ended is sent, or could not be."""
        self._provider.force_flush()

    def close(self) -> None:
        last = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        last.start()
        last.join(CLOSE_S)

    def _context(self, parent: str) -> Context:
        return self._propagator.extract({"traceparent": parent})

    def _traceparent(self, span: trace.Span) -> str:
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")


class _OpenSpan:
    def __init__(self, span: trace.Span, traceparent: str) -> None:
        self._span = span
        self._traceparent = traceparent

    @property
    def traceparent(self) -> str:
        return self._traceparent

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, attributes)

    def end(self, attributes: Attributes, error: str = "") -> None:
        _finish(self._span, attributes, error, time.time_ns())


def _finish(span: trace.Span, attributes: Attributes, error: str, end_ns: int) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes(attributes)
    if error:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(end_ns)


def _complaining_once(exporter: SpanExporter, url: str) -> SpanExporter:
    """`exporter`, whose first failure is logged."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Complaining(SpanExporter):
        has_complained = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = exporter.export(spans)
            if result is not SpanExportResult.SUCCESS and not self.has_complained:
                self.has_complained = True
                log.warning(
                    "traces cannot be sent to %s and are dropped while that is so; this is said "
                    "only once",
                    url,
                )
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Complaining()
