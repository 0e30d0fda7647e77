"""Lost workers, late workers and clients that leave: no hang, no fake finish, nothing left over."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.messages import HandBack, Submit
from engine.types import TokenOut
from server.generation import Limits
from tests.server.scripted import Server, reply, serving
from tests.server.stream import BODY, CHAT, SPOKEN, TEXT, Stream, stalling
from tests.server.worker import ScriptedWorker


@pytest.mark.parametrize("num_tokens", [0, 1, 5, len(SPOKEN) - 1])
def test_a_lost_worker_is_invisible(num_tokens: int) -> None:
    with serving() as server:
        script, reached = stalling(num_tokens)
        lost = server.add_worker(script)
        stream = Stream(server, seed=4)
        assert reached.wait(60)
        server.until(
            lambda: all(
                len(a.token_ids) == num_tokens for a in server.client.requests.answers.values()
            )
        )
        heir = server.add_worker(reply(SPOKEN))
        lost.vanish()
        assert stream.answer() == (TEXT, ["stop"])
        replayed = heir.submits.get(timeout=60)
        assert replayed.output_ids == SPOKEN[:num_tokens]
        assert replayed.request == lost.submits.get(timeout=60).request
        assert len(server.client.requests) == 0


def test_a_worker_that_says_goodbye_hands_on_its_requests() -> None:
    with serving() as server:
        script, reached = stalling(3)
        leaving = server.add_worker(script)
        stream = Stream(server)
        assert reached.wait(60)
        server.add_worker(reply(SPOKEN))
        leaving.leave()
        assert stream.answer() == (TEXT, ["stop"])
        metrics = server.http.get("/metrics").text
        assert 'plait_replays_total{reason="handed_back"} 1.0' in metrics
        assert 'plait_replays_total{reason="lost"} 0.0' in metrics


def test_requests_wait_for_the_restart_of_the_only_worker() -> None:
    with serving() as server:
        script, reached = stalling(4)
        first = server.add_worker(script)
        stream = Stream(server)
        assert reached.wait(60)
        first.vanish()
        server.until(lambda: len(server.client.fleet) == 0)
        late = Stream(server)
        server.until(lambda: server.client.metrics.num_parked == 2)
        assert server.http.get("/ready").status_code == 503
        server.add_worker(reply(SPOKEN))
        assert stream.answer() == (TEXT, ["stop"])
        assert late.answer() == (TEXT, ["stop"])


def test_what_reaches_the_successor_of_a_lost_worker_is_aborted() -> None:
    """It was sent when the connection was new again, and the event loop did not know of it yet."""
    with serving() as server:
        first, other = server.add_worker(stalling(0)[0]), server.add_worker(stalling(0)[0])
        other.drain()
        server.until(lambda: sum(w.takes_requests for w in server.client.fleet) == 1)
        stream = Stream(server)
        submit = first.submits.get(timeout=60)
        successors: list[ScriptedWorker] = []

        def lose() -> None:
            first.vanish()
            vocab_size = server.tokenizer.vocab_size
            successor = ScriptedWorker(first.address, stalling(0)[0], vocab_size)
            successors.append(successor)
            while not successor.is_dialled:
                time.sleep(0)
            server.client.requests.handed_back(
                HandBack(rid=submit.request.rid, attempt=0, reason="the last words")
            )
            assert successor.submits.get(timeout=60).attempt == 1

        server.call(lose)
        server.workers += successors
        assert [successors[0].aborts.get(timeout=60).attempt for _ in range(2)] == [0, 1]
        server.call(lambda: server.client.requests.fail_all("enough"))
        stream.join()


def test_replays_are_bounded_and_end_in_an_error() -> None:
    with serving(Limits(max_replays=1)) as server:
        stream: Stream | None = None
        for num_tokens in (2, 0):
            script, reached = stalling(num_tokens)
            worker = server.add_worker(script)
            stream = stream or Stream(server)
            assert reached.wait(60)
            worker.vanish()
            server.until(lambda: len(server.client.fleet) == 0)
        assert stream is not None
        values = stream.values()
        assert "the request was lost 2 times" in values[-1]["error"]["message"]
        assert all(v["choices"][0]["finish_reason"] is None for v in values[:-1])


def test_no_worker_within_the_wait_ends_in_an_error() -> None:
    with serving(Limits(worker_wait_s=0)) as server:
        script, reached = stalling(2)
        worker = server.add_worker(script)
        stream = Stream(server)
        assert reached.wait(60)
        worker.vanish()
        assert stream.values()[-1]["error"]["code"] == "unavailable"
        assert len(server.client.requests) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_aborts(stream: bool, num_tokens: int, n: int) -> None:
    with serving() as server:
        script, reached = stalling(num_tokens)
        worker = server.add_worker(script)
        body = {**BODY, "stream": stream, "n": n}
        with httpx.Client(timeout=60) as client:
            if stream and num_tokens:
                with client.stream("POST", f"{server.base_url}{CHAT}", json=body) as response:
                    next(response.iter_lines())
            else:
                leave_after(server, body, reached)
        assert {worker.aborts.get(timeout=60).rid for _ in range(n)} == {
            worker.submits.get(timeout=60).request.rid for _ in range(n)
        }
        server.until(lambda: len(server.client.requests) == 0)
        server.until(lambda: all(w.load.num_running == 0 for w in server.client.fleet))
        server.until(
            lambda: "plait_requests_running 0.0" in server.client.metrics.expose().decode()
        )
        metrics = server.http.get("/metrics").text
        assert f"plait_aborts_total {n}.0" in metrics
        assert f'finish_reason="abort",route="{CHAT}"}} {n}.0' in metrics


def leave_after(server: Server, body: dict[str, Any], reached: threading.Event) -> None:
    """Sends a request by hand and closes the socket without reading an answer."""
    import socket

    url = httpx.URL(server.base_url)
    content = json.dumps(body).encode()
    with socket.create_connection((url.host, url.port or 0)) as connection:
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (CHAT.encode(), len(content)) + content
        )
        assert reached.wait(60)


def test_requests_go_to_the_least_loaded_worker() -> None:
    with serving() as server:
        scripts = [stalling(1), stalling(1)]
        workers = [server.add_worker(script) for script, _ in scripts]
        streams = [Stream(server) for _ in range(2)]
        for _, reached in scripts:
            assert reached.wait(60)
        assert [worker.submits.qsize() for worker in workers] == [1, 1]
        server.call(lambda: server.client.requests.fail_all("enough"))
        for stream in streams:  # which may not have begun: then it is an answer of its own
            stream.join()
            assert '"message":"enough"' in "".join(stream.lines)


def test_draining_waits_for_what_runs() -> None:
    with serving() as server:
        gate = threading.Event()

        def script(submit: Submit) -> Iterator[TokenOut | None]:
            for out in reply(SPOKEN)(submit):
                yield out
                while not gate.is_set():
                    yield None

        worker = server.add_worker(script)
        stream = Stream(server)
        worker.submits.get(timeout=60)
        server.call(server.client.start_draining)
        assert len(server.client.requests) == 1
        gate.set()
        assert stream.answer() == (TEXT, ["stop"])
        server.until(lambda: len(server.client.requests) == 0)


def test_an_abort_the_client_did_not_ask_for_is_an_error() -> None:
    def script(submit: Submit) -> Iterator[TokenOut | None]:
        yield TokenOut(rid=submit.request.rid, index=0, ids=SPOKEN[:1])
        yield TokenOut(rid=submit.request.rid, index=1, finish_reason="abort")

    with serving() as server:
        server.add_worker(script)
        values = Stream(server).values()
        assert values[-1]["error"]["code"] == "worker_error"
        assert all(v["choices"][0]["finish_reason"] is None for v in values[:-1])


def test_outputs_of_unknown_requests_are_ignored() -> None:
    def script(submit: Submit) -> Iterator[TokenOut | None]:
        yield TokenOut(rid="nobody", index=0, ids=[1], finish_reason="stop")
        yield from reply(SPOKEN)(submit)

    with serving() as server:
        server.add_worker(script)
        assert Stream(server).answer() == (TEXT, ["stop"])
