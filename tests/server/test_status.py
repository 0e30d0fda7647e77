"""GET /status and `plait status`: what they say of a fleet, and what of a server that is none."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from engine.types import Load
from server.status import TierStatus, fleet_status
from server.verbs import main
from tests.server.scripted import Server, reply, serving
from tests.server.stream import Stream, stalling

PREFILL_LOAD = Load(
    num_waiting=2, waiting_tokens=300, free_pages=1000, evictable_pages=14, num_rooms=3
)
DECODE_LOAD = Load(free_pages=900, evictable_pages=100, locked_pages=4, fenced_pages=7)


@pytest.fixture(autouse=True)
def no_key_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """A prefill group and a decode worker that have nothing to do."""
    with serving(api_key=("sesame",)) as server:
        loads = {"prefill": PREFILL_LOAD, "decode": DECODE_LOAD}
        for role, load in loads.items():
            server.add_worker(reply([5]), role=role).beat(load)
        server.until(lambda: all(w.load == loads[w.hello.role] for w in server.client.fleet))
        yield server


def command(server: Server, *flags: str) -> int:
    return main(["status", "--url", server.base_url, "--api-key", "sesame", *flags])


def test_every_worker_is_shown_with_load_and_pages(
    pair: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(pair, "--json") == 0
    status = json.loads(capsys.readouterr().out)
    prefill, decode = status["workers"]
    known = pair.workers[0]
    assert prefill == {
        "role": "prefill",
        "instance_id": known.instance_id,
        "pid": known.pid,
        "host": "here",
        "address": known.address,
        "ranks": 2,
        "model": "0123456789abcdef in float32",
        "health": "ok",
        "requests": 0,
        "load": {"running": 0, "waiting": 2, "waiting_tokens": 300, "rooms": 3},
        "pages": {"device": {"used": 10, "cached": 14, "free": 1000, "fenced": 0, "total": 1024}},
    }
    assert (decode["role"], decode["ranks"]) == ("decode", 1)
    assert decode["pages"] == {
        "device": {"used": 17, "cached": 100, "free": 900, "fenced": 7, "total": 1024}
    }
    assert (status["status"], status["requests"], status["parked"]) == ("ok", 0, 0)
    assert status["absent"] == status["refused"] == []


def test_a_host_tier_is_shown_beside_the_device() -> None:
    with serving() as server:
        worker = server.add_worker(reply([5]))
        worker.beat(Load(free_pages=1, total_host_pages=40, free_host_pages=30))

        def host() -> TierStatus | None:
            [status] = fleet_status(server.client).workers
            return status.pages.get("host")

        server.until(lambda: host() is not None)
        assert host() == TierStatus(used=0, cached=10, free=30, fenced=0, total=40)


def test_people_get_a_table(pair: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(pair) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok; 0 requests unfinished"
    [prefill] = [line for line in lines if line.startswith("prefill")]
    assert "device: 10 + 14 + 1000 + 0 = 1024" in prefill
    assert pair.workers[0].instance_id[:8] in prefill


def test_without_the_key_nothing_is_told(pair: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert pair.http.get("/status").status_code == 401
    assert main(["status", "--url", pair.base_url]) == 1
    assert f"--url {pair.base_url}: a key is needed; give --api-key" in capsys.readouterr().err
    assert main(["status", "--url", pair.base_url, "--api-key", "abracadabra"]) == 1
    error = capsys.readouterr().err
    assert "the key is refused; expected --api-key" in error
    assert "abracadabra" not in error


def test_the_key_may_be_a_variable_and_the_url_that_of_the_sdk(
    pair: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert main(["status", "--json", "--url", f"{pair.base_url}/v1/"]) == 0
    assert len(json.loads(capsys.readouterr().out)["workers"]) == 2


def test_a_request_counts_at_both_its_workers() -> None:
    with serving() as server:
        script, _ = stalling(0)
        decode = server.add_worker(script, role="decode")
        server.add_worker(script, role="prefill")
        Stream(server)
        decode.submits.get(timeout=60)
        status = ask(server)
        assert [worker["requests"] for worker in status["workers"]] == [1, 1]
        assert (status["requests"], status["parked"]) == (1, 0)
        server.call(lambda: server.client.requests.fail_all("enough"))
        status = ask(server)
        assert [worker["requests"] for worker in status["workers"]] == [0, 0]


def test_health_is_what_is_known_of_a_worker() -> None:
    with serving() as server:
        worker = server.add_worker(reply([5]))
        client = server.client

        def health() -> str:
            [status] = fleet_status(client).workers
            return status.health

        def overlooked() -> str:
            """On the event loop: nothing that the worker says comes in between."""
            known = client.fleet.at(worker.address)
            assert known is not None
            known.num_silent_looks = 2
            return health()

        assert server.call(health) == "ok"
        assert server.call(overlooked) == "silent"
        server.call(lambda: client.router.hints.mark(worker.address))
        server.until(lambda: health() == "overloaded")
        worker.beat(Load(free_pages=1, is_draining=True))
        server.until(lambda: health() == "draining")


def ask(server: Server) -> Any:
    return server.http.get("/status").json()


def test_a_worker_that_is_gone_is_absent_and_its_requests_are_parked() -> None:
    with serving() as server:
        worker = server.add_worker(reply([5]))
        worker.vanish()
        server.until(lambda: len(server.client.fleet) == 0)
        status = ask(server)
        assert status["workers"] == []
        assert status["absent"] == [worker.address]
        assert status["status"] == "no worker is ready"
        server.call(lambda: server.client.roster.remove(worker.address))
        assert ask(server)["absent"] == []


def test_where_nothing_listens_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and never listens
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        assert main(["status", "--url", url]) == 1
    error = capsys.readouterr().err
    assert f"plait status: --url {url}: no answer: " in error
    assert "expected a running `plait serve`" in error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://here", "http://[1", "http://a:b"])
def test_a_url_that_is_none_is_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url]) == 1
    assert f"plait status: --url {url}: " in capsys.readouterr().err


def test_another_server_is_no_plait(pair: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", f"{pair.base_url}/other", "--api-key", "sesame"]) == 1
    assert "answers 404; expected a plait server" in capsys.readouterr().err
