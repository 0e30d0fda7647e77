"""A Kubernetes API that serves EndpointSlices over the real wire: HTTP, chunks, lists in pages,
watches with bookmarks, and every way in which they end."""

from __future__ import annotations

import json
import queue
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "models"
SERVICE = "plait-decode"
PREFIX = "/apis/discovery.k8s.io/v1/namespaces/"
PORT_NAME = "control"

END = b""  # of a watch, as the API ends one
CUT = b"cut"  # the connection breaks


def endpoint(host: str, *, ready: bool | None = True, terminating: bool = False) -> dict[str, Any]:
    serving = ready is not False or terminating
    conditions = {"ready": ready, "serving": serving, "terminating": terminating}
    return {
        "addresses": [host],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": f"pod-{host}"},
        "nodeName": "node",
    }


def failure(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


@dataclass
class Asked:
    verb: str  # list or watch
    version: str  # resourceVersion to watch from
    token: str


@dataclass
class _Watch:
    service: str
    lines: queue.Queue[bytes] = field(default_factory=queue.Queue)


class FakeApi:
    """`tokens` are accepted, `denied` holds the verbs that are forbidden, `is_open` lets lists be
    answered; `asked` is what came."""

    def __init__(self, *, certificate: str = "", port: int = 0) -> None:
        self.tokens = {"first"}
        self.denied: set[str] = set()
        self.is_open = threading.Event()
        self.is_open.set()
        self.page_items = 500
        self.asked: list[Asked] = []
        self._lock = threading.Lock()
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 1000
        self._oldest = 0  # a watch from before it is too late
        self._events: list[tuple[int, str, bytes]] = []  # (version, service, line)
        self._watches: list[_Watch] = []
        api = self

        class Handler(_Handler):
            pass

        Handler.api = api
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = False
        scheme = "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.port = self._server.server_address[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self.is_open.set()
        self._say(CUT)
        self._server.server_close()

    # -- what happens in the cluster

    def put(
        self,
        name: str,
        port: int,
        endpoints: list[dict[str, Any]] | None,
        *,
        service: str = SERVICE,
        port_name: str = PORT_NAME,
    ) -> None:
        with self._lock:
            kind = "MODIFIED" if name in self._slices else "ADDED"
            self._version += 1
            self._slices[name] = {
                "kind": "EndpointSlice",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {
                    "name": name,
                    "namespace": NAMESPACE,
                    "labels": {"kubernetes.io/service-name": service},
                    "resourceVersion": str(self._version),
                    "generation": 3,
                },
                "addressType": "IPv4",
                "endpoints": endpoints,
                "ports": [
                    {"name": "metrics", "port": 1, "protocol": "TCP"},
                    {"name": port_name, "port": port, "protocol": "TCP", "appProtocol": None},
                ],
            }
            self._tell(kind, self._slices[name])

    def delete(self, name: str) -> None:
        with self._lock:
            self._version += 1
            gone = self._slices.pop(name)
            gone["metadata"]["resourceVersion"] = str(self._version)
            self._tell("DELETED", gone)

    def _tell(self, kind: str, part: dict[str, Any]) -> None:
        line = _line({"type": kind, "object": part})
        service = part["metadata"]["labels"]["kubernetes.io/service-name"]
        self._events.append((self._version, service, line))
        for watch in self._watches:
            if watch.service == service:
                watch.lines.put(line)

    # -- what happens to watches

    def bookmark(self) -> str:
        """Time goes on elsewhere in the cluster. The version that is told."""
        with self._lock:
            self._version += 100
            metadata = {"resourceVersion": str(self._version), "creationTimestamp": None}
            part = {"kind": "EndpointSlice", "metadata": metadata}
            part |= {"addressType": "", "endpoints": None, "ports": None}
            self._say(_line({"type": "BOOKMARK", "object": part}))
            return str(self._version)

    def forget(self) -> None:
        """All that was so far is too old to watch from; those who watch are told."""
        with self._lock:
            self._version += 1
            self._oldest = self._version
            self._say(_line({"type": "ERROR", "object": _too_old()}))
            self._say(END)

    def end(self) -> None:
        self._say(END)

    def cut(self, half_a_line: bytes = b"") -> None:
        if half_a_line:
            self._say(half_a_line)
        self._say(CUT)

    def _say(self, data: bytes) -> None:
        for watch in list(self._watches):
            watch.lines.put(data)

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def num_asked(self, verb: str) -> int:
        return len([asked for asked in self.asked if asked.verb == verb])

    # -- what the handler needs

    def page(self, service: str, begin: int) -> dict[str, Any]:
        with self._lock:
            items = [
                part
                for part in self._slices.values()
                if part["metadata"]["labels"]["kubernetes.io/service-name"] == service
            ]
            metadata: dict[str, Any] = {"resourceVersion": str(self._version)}
            end = begin + self.page_items
            if end < len(items):
                metadata |= {"continue": str(end), "remainingItemCount": len(items) - end}
            kind = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
            return {**kind, "metadata": metadata, "items": items[begin:end]}

    def watch(self, service: str, version: int) -> _Watch | None:
        """None: too old."""
        with self._lock:
            if version < self._oldest:
                return None
            watch = _Watch(service)
            for at, of, line in self._events:
                if at > version and of == service:
                    watch.lines.put(line)
            self._watches.append(watch)
            return watch

    def leave(self, watch: _Watch) -> None:
        with self._lock:
            self._watches.remove(watch)


def _too_old() -> dict[str, Any]:
    return failure(410, "Expired", "too old resource version: 1000 (1001)")


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: FakeApi

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        service = query["labelSelector"].removeprefix("kubernetes.io/service-name=")
        verb = "watch" if query.get("watch") == "true" else "list"
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.api.asked.append(Asked(verb, query.get("resourceVersion", ""), token))
        assert url.path == f"{PREFIX}{NAMESPACE}/endpointslices"
        if token not in self.api.tokens:
            self._answer(401, failure(401, "Unauthorized", "Unauthorized"))
        elif verb in self.api.denied:
            who = 'User "system:serviceaccount:models:default"'
            message = f"endpointslices.discovery.k8s.io is forbidden: {who} cannot {verb} resource"
            self._answer(403, failure(403, "Forbidden", message))
        elif verb == "list":
            self.api.is_open.wait()
            self._answer(200, self.api.page(service, int(query.get("continue", 0))))
        else:
            self._watch(service, int(query["resourceVersion"]))

    def _answer(self, code: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self, service: str, version: int) -> None:
        watch = self.api.watch(service, version)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if watch is None:
            self._chunk(_line({"type": "ERROR", "object": _too_old()}))
            self._chunk(END)
            return
        try:
            while (data := watch.lines.get()) != CUT:
                self._chunk(data)
                if data == END:
                    return
            self.close_connection = True
        except OSError:
            self.close_connection = True
        finally:
            self.api.leave(watch)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()
