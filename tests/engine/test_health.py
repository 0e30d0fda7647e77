"""What a worker's probes say, as it loads, serves, drains and hangs; and its own /metrics."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.health import MAX_TURN_S, HealthServer, State, Vitals
from engine.types import Load, MetricFamily, MetricSample


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def vitals(clock: Clock) -> Vitals:
    return Vitals("decode", clock)


@pytest.fixture
def client(vitals: Vitals) -> Iterator[httpx.Client]:
    server = HealthServer("127.0.0.1:0", vitals)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client:
        yield client
    server.close()


@pytest.mark.parametrize(
    ("state", "live", "ready", "health"),
    [("loading", 200, 503, 503), ("ready", 200, 200, 200), ("draining", 200, 503, 200)],
)
def test_each_probe_has_a_meaning_of_its_own(
    client: httpx.Client, vitals: Vitals, state: State, live: int, ready: int, health: int
) -> None:
    vitals.state = state
    vitals.turned()
    answers = {path: client.get(path) for path in ("/live", "/ready", "/health")}
    assert {path: answer.status_code for path, answer in answers.items()} == {
        "/live": live,
        "/ready": ready,
        "/health": health,
    }
    assert {answer.json()["status"] for answer in answers.values()} == {state}


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_a_loop_that_hangs_fails_every_probe_until_it_comes_round(
    client: httpx.Client, vitals: Vitals, clock: Clock, state: State
) -> None:
    vitals.state = state
    vitals.turned()
    clock.now += MAX_TURN_S - 1
    assert client.get("/live").status_code == 200
    clock.now += 2
    for path in ("/live", "/ready", "/health"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["status"]) == (503, "stuck")
    vitals.turned()
    assert client.get("/live").status_code == 200


def test_loading_may_take_as_long_as_the_start_up_probe_lets_it(
    client: httpx.Client, vitals: Vitals, clock: Clock
) -> None:
    clock.now += 100 * MAX_TURN_S
    assert client.get("/live").status_code == 200


def test_health_says_how_busy_the_worker_is(client: httpx.Client, vitals: Vitals) -> None:
    vitals.state = "ready"
    vitals.turned()
    vitals.load = Load(num_running=3, num_waiting=5)
    assert client.get("/health").json() == {
        "status": "ready",
        "role": "decode",
        "requests_running": 3,
        "requests_waiting": 5,
    }


def test_metrics_are_the_last_heartbeats_with_the_role(
    client: httpx.Client, vitals: Vitals
) -> None:
    assert client.get("/metrics").text == ""
    vitals.families = [
        MetricFamily(
            "plait_x", "counter", "Xs", [MetricSample("plait_x_total", {"rank": "1"}, 7.0)]
        )
    ]
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    (family,) = text_string_to_metric_families(answer.text)
    assert (family.name, family.type) == ("plait_x", "counter")
    assert [(s.name, s.labels, s.value) for s in family.samples] == [
        ("plait_x_total", {"rank": "1", "role": "decode"}, 7.0)
    ]


def test_another_path_is_404_and_says_which_there_are(client: httpx.Client) -> None:
    answer = client.get("/v1/models")
    assert answer.status_code == 404
    assert "/ready" in answer.json()["error"]


def test_a_taken_port_names_the_flag(vitals: Vitals) -> None:
    server = HealthServer("127.0.0.1:0", vitals)
    try:
        with pytest.raises(OSError, match=rf"--health-address 127.0.0.1:{server.port}: "):
            HealthServer(f"127.0.0.1:{server.port}", vitals)
    finally:
        server.close()


def test_ipv6_hosts_stand_in_brackets(vitals: Vitals) -> None:
    server = HealthServer("[::1]:0", vitals)
    try:
        assert httpx.get(f"http://[::1]:{server.port}/live").status_code == 200
    finally:
        server.close()
