"""A worker's probes and metrics over HTTP: /live, /ready, /health, /metrics at --health-address.

Owns the listener and what it answers. Reads what the worker's loop writes down; decides nothing and
speaks to no other process.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.types import Load, MetricFamily, Role

log = logging.getLogger("plait.worker")

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A loop that has not come round for this long hangs: far longer than any step, its compilations
# included, and the other processes of a fleet only notice a worker that is silent altogether.
MAX_TURN_S = 300.0
_REQUEST_S = 10.0  # a client that is slower is cut off

State = Literal["loading", "ready", "draining"]


@dataclass(slots=True)
class Vitals:
    """What the loop writes down and probes read, each field by itself: there is no lock."""

    role: Role
    clock: Callable[[], float] = time.monotonic
    state: State = "loading"
    turned_s: float = 0.0  # when the loop last came round; means nothing while loading
    load: Load = field(default_factory=Load)
    families: list[MetricFamily] = field(default_factory=list)

    def turned(self) -> None:
        self.turned_s = self.clock()

    @property
    def is_live(self) -> bool:
        """While loading the process is taken for alive: how long that may last is for the start-up
        probe to say."""
        return self.state == "loading" or self.clock() - self.turned_s < MAX_TURN_S

    def answer(self, path: str) -> tuple[int, dict[str, object]] | None:
        """Status and body of a probe; None where there is none of that name."""
        status = self.state if self.is_live else "stuck"
        match path:
            case "/live":
                return (200 if self.is_live else 503), {"status": status}
            case "/ready":
                return (200 if status == "ready" else 503), {"status": status}
            case "/health":
                return (200 if status in ("ready", "draining") else 503), {
                    "status": status,
                    "role": self.role,
                    "requests_running": self.load.num_running,
                    "requests_waiting": self.load.num_waiting,
                }
        return None


class _Families(Collector):
    """The worker's families as its last heartbeat had them, each sample with the role beside its
    own labels."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals

    def collect(self) -> Iterator[Metric]:
        for family in self._vitals.families:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                labels = {**sample.labels, "role": self._vitals.role}
                metric.add_sample(sample.name, labels, sample.value)
            yield metric

    def describe(self) -> Iterator[Metric]:
        return iter(())


class HealthServer:
    """Listens from its making until `close`, in daemon threads. Raises OSError where it cannot."""

    def __init__(self, address: str, vitals: Vitals) -> None:
        """`address`: HOST:PORT, an IPv6 host in brackets; port 0 picks a free one."""
        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        registry.register(_Families(vitals))
        try:
            self._server = _server(host.strip("[]"), int(port), _handler(vitals, registry))
        except (OSError, OverflowError) as error:
            raise OSError(
                f"--health-address {address}: {error}; expected HOST:PORT of this machine that is "
                "free"
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="health", daemon=True
        )
        self._thread.start()
        log.info("probes and metrics at %s:%d", host, self.port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingTCPServer):
    """Not http.server's own: that one asks the resolver for a name of its address at the start."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # a client that dawdles does not hold the worker's end up


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> _Server:
    return (_Server6 if ":" in host else _Server)((host, port), handler)


def _handler(vitals: Vitals, registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S
        server_version = "plait"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._send(200, METRICS_TYPE, generate_latest(registry))
                return
            answer = vitals.answer(path)
            if answer is None:
                answer = 404, {"error": "expected /live, /ready, /health or /metrics"}
            self._send(answer[0], "application/json", msgspec.json.encode(answer[1]))

        do_HEAD = do_GET

        def _send(self, status: int, media_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug("health: " + format, *args)

    return Handler
