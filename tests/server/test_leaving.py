"""A front end that is about to end: balancers are told first, connections are closed politely."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator

import httpx

from engine.messages import Submit
from engine.types import TokenOut
from tests.server.scripted import Server, reply, serving
from tests.server.stream import BODY, CHAT, SPOKEN, TEXT, Stream, stalling


def connect(server: Server) -> contextlib.closing[http.client.HTTPConnection]:
    url = httpx.URL(server.base_url)
    return contextlib.closing(http.client.HTTPConnection(url.host, url.port, timeout=60))


def ask(connection: http.client.HTTPConnection, method: str, path: str) -> tuple[int, str | None]:
    """Status and `Connection` header of one answer, which is read to its end."""
    body = json.dumps(BODY) if method == "POST" else None
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status, response.getheader("connection")


def ask_once(server: Server, method: str, path: str) -> tuple[int, str | None]:
    with connect(server) as connection:
        return ask(connection, method, path)


def test_who_leaves_says_so_and_serves_what_still_comes() -> None:
    with serving() as server:
        server.add_worker(reply(SPOKEN))
        for path in ("/ready", "/live", "/health"):
            assert ask_once(server, "GET", path) == (200, None)
        server.call(server.client.start_leaving)
        assert ask_once(server, "GET", "/ready") == (503, "close")
        assert ask_once(server, "GET", "/live") == (200, "close")
        assert ask_once(server, "POST", CHAT) == (200, "close")
        assert Stream(server).answer() == (TEXT, ["stop"])
        assert server.http.get("/status").json()["status"] == "draining"
        server.call(server.client.start_draining)
        assert ask_once(server, "POST", CHAT) == (503, "close")


def test_idle_connections_are_closed_and_busy_ones_after_their_answer() -> None:
    with serving() as server:
        goes_on = threading.Event()

        def script(submit: Submit) -> Iterator[TokenOut | None]:
            for out in reply(SPOKEN)(submit):
                yield out
                while not goes_on.is_set():
                    yield None

        server.add_worker(script)
        with connect(server) as idle, connect(server) as busy:
            assert ask(idle, "GET", "/live") == (200, None)
            stream = json.dumps({**BODY, "stream": True})
            busy.request("POST", CHAT, stream, {"Content-Type": "application/json"})
            response = busy.getresponse()
            assert response.readline().startswith(b"data: ")
            server.call(server.http_server.close_idle)
            assert idle.sock.recv(1) == b""
            goes_on.set()
            assert response.read().endswith(b"data: [DONE]\n\n")
            assert busy.sock.recv(1) == b""
        assert ask_once(server, "GET", "/live")[0] == 200, "new ones are accepted"


def test_a_front_end_whose_workers_all_drain_is_not_ready() -> None:
    with serving() as server:
        script, reached = stalling(1)
        worker = server.add_worker(script)
        stream = Stream(server)
        assert reached.wait(60)
        worker.drain()
        server.until(lambda: not server.client.is_ready)
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200
        late = Stream(server)
        server.until(lambda: server.client.metrics.num_parked == 1)
        server.add_worker(reply(SPOKEN))
        assert late.answer() == (TEXT, ["stop"])
        assert server.http.get("/ready").status_code == 200
        worker.leave()
        assert stream.answer() == (TEXT, ["stop"])
