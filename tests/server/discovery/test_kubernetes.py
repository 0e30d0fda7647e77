"""Workers found by a Kubernetes service, over the API's real wire: they come, go and are replaced,
and whatever becomes of the API, the front end goes on with what it knows."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.messages import Submit
from engine.types import TokenOut
from server.discovery.kubernetes import KubernetesSource
from server.discovery.kubernetes_api import KubernetesApi
from server.discovery.places import kubernetes_service
from server.options.config import ConfigError
from tests.server.discovery.fake_api import SERVICE, FakeApi, endpoint
from tests.server.discovery.following import (
    ITEM,
    Cluster,
    credentials_in,
    discovering,
    following,
    place_of,
)
from tests.server.scripted import Script, reply, serving
from tests.server.stream import SPOKEN, TEXT, Stream

SPEAKING = reply(SPOKEN)
READY = '{source="kubernetes"}'


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with following(tmp_path) as running:
        yield running


def gated() -> tuple[Script, threading.Event, threading.Event]:
    """Says two tokens, then waits for the second event; the first is set once they are out."""
    reached, goes_on = threading.Event(), threading.Event()

    def script(submit: Submit) -> Iterator[TokenOut | None]:
        for number, out in enumerate(SPEAKING(submit)):
            while number == 2 and not goes_on.is_set():
                reached.set()
                yield None
            yield out

    return script, reached, goes_on


def test_workers_come_and_go_while_the_front_end_serves(cluster: Cluster) -> None:
    first, second = cluster.start_pod(SPEAKING), cluster.start_pod(SPEAKING)
    cluster.publish("a", first)
    cluster.until_known(first)
    assert Stream(cluster.server).answer() == (TEXT, ["stop"])
    cluster.publish("b", second)
    cluster.until_known(first, second)
    assert cluster.counted("plait_discovery_endpoints", READY) == 2
    cluster.api.delete("a")
    cluster.until_known(second)
    assert Stream(cluster.server).answer() == (TEXT, ["stop"])
    assert cluster.counted("plait_discovery_endpoints", READY) == 1
    assert cluster.api.num_asked("list") == 1, "changes are watched, not listed"


@pytest.mark.parametrize("how", ["terminating", "unready", "gone"])
def test_one_that_is_ready_no_more_gets_nothing_new_and_keeps_its_streams(
    cluster: Cluster, how: str
) -> None:
    script, reached, goes_on = gated()
    leaving = cluster.start_pod(script)
    cluster.publish("a", leaving)
    cluster.until_known(leaving)
    running = Stream(cluster.server)
    assert reached.wait(60)
    if how == "gone":
        cluster.api.delete("a")
    else:
        cluster.publish("a", leaving, ready=False, terminating=how == "terminating")
    cluster.server.until(lambda: not cluster.server.client.is_ready)
    assert cluster.server.http.get("/ready").status_code == 503
    heir = cluster.start_pod(SPEAKING)
    cluster.publish("b", heir)
    cluster.until_known(leaving, heir)
    assert Stream(cluster.server).answer() == (TEXT, ["stop"])
    assert heir.submits.get(timeout=60).output_ids == []
    goes_on.set()
    assert running.answer() == (TEXT, ["stop"])
    assert (leaving.submits.qsize(), heir.submits.qsize()) == (1, 0), "it was not replayed"
    cluster.until_known(heir)  # the other one is forgotten once it has nothing to do


def test_one_that_was_not_ready_for_a_while_is_taken_up_again(cluster: Cluster) -> None:
    script, reached, goes_on = gated()
    worker = cluster.start_pod(script)
    cluster.publish("a", worker)
    cluster.until_known(worker)
    running = Stream(cluster.server)
    assert reached.wait(60)
    cluster.publish("a", worker, ready=False)
    cluster.server.until(lambda: not cluster.server.client.is_ready)
    waiting = Stream(cluster.server)
    cluster.server.until(lambda: cluster.server.client.metrics.num_parked == 1)
    cluster.publish("a", worker)
    cluster.server.until(lambda: cluster.server.client.metrics.num_parked == 0)
    goes_on.set()
    assert running.answer() == waiting.answer() == (TEXT, ["stop"])


def test_an_endpoint_that_is_not_ready_is_not_dialled(cluster: Cluster) -> None:
    early, ready = cluster.start_pod(SPEAKING), cluster.start_pod(SPEAKING)
    cluster.publish("a", early, ready=False)
    cluster.publish("b", ready, ready=None)  # unknown counts as ready
    cluster.until_known(ready)
    assert cluster.server.http.get("/status").json()["absent"] == []
    cluster.publish("a", early)
    cluster.until_known(early, ready)


def test_a_worker_that_is_replaced_at_its_address_or_its_name_is_followed(
    cluster: Cluster,
) -> None:
    script, reached, _ = gated()
    first = cluster.start_pod(script)
    cluster.publish("a", first)
    cluster.until_known(first)
    stream = Stream(cluster.server)
    assert reached.wait(60)
    first.vanish()
    host, port = place_of(first)
    second = cluster.server.add_worker(SPEAKING, address=f"tcp://{host}:{port}")
    cluster.until_known(second)
    assert stream.answer() == (TEXT, ["stop"])
    third = cluster.start_pod(SPEAKING, "127.0.0.2")
    cluster.publish("a", third)  # the pod has its name still, and another address
    cluster.until_known(third)
    assert Stream(cluster.server).answer() == (TEXT, ["stop"])


def test_a_watch_that_breaks_in_mid_line_goes_on_from_where_it_was(cluster: Cluster) -> None:
    first, second = cluster.start_pod(SPEAKING), cluster.start_pod(SPEAKING)
    cluster.publish("a", first)
    cluster.until_known(first)
    cluster.until_watched()
    cluster.api.cut(b'{"type":"DELETED","object":{"metadata":{"name":"a","resourceV')
    cluster.publish("b", second)
    cluster.until_known(first, second)
    assert cluster.api.num_asked("list") == 1
    lost = '{reason="lost",source="kubernetes"}'
    assert cluster.counted("plait_discovery_failures_total", lost) == 1
    cluster.server.until(lambda: not cluster.trouble)


def test_a_watch_goes_on_from_its_last_bookmark(cluster: Cluster) -> None:
    worker = cluster.start_pod(SPEAKING)
    cluster.publish("a", worker)
    cluster.until_known(worker)
    cluster.until_watched()
    version = cluster.api.bookmark()
    cluster.api.end()
    cluster.server.until(lambda: cluster.api.asked[-1].version == version)
    assert cluster.api.num_asked("list") == 1
    cluster.until_known(worker)


def test_versions_that_are_too_old_are_listed_again(cluster: Cluster) -> None:
    first, second = cluster.start_pod(SPEAKING), cluster.start_pod(SPEAKING)
    cluster.publish("a", first)
    cluster.until_known(first)
    cluster.until_watched()
    cluster.api.forget()
    cluster.server.until(lambda: cluster.api.num_asked("list") == 2)
    cluster.publish("b", second)
    cluster.until_known(first, second)
    assert cluster.counted("plait_discovery_lists_total", READY) == 2
    # The same where nothing but the list can say what happened in between.
    cluster.api.denied = {"watch"}
    cluster.api.cut()
    cluster.server.until(lambda: cluster.trouble != "")
    cluster.api.delete("a")
    cluster.api.forget()
    cluster.api.denied = set()
    cluster.until_known(second)


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_missing_right_is_named_and_known_workers_stay(cluster: Cluster, verb: str) -> None:
    first, second = cluster.start_pod(SPEAKING), cluster.start_pod(SPEAKING)
    cluster.publish("a", first)
    cluster.until_known(first)
    cluster.until_watched()
    cluster.api.denied = {verb}
    cluster.api.forget()
    cluster.server.until(lambda: cluster.trouble != "")
    error = cluster.shown_error()
    assert f"answers 403 to {verb} endpointslices" in error
    assert 'apiGroups: ["discovery.k8s.io"], resources: ["endpointslices"]' in error
    assert 'verbs: ["list", "watch"]' in error
    assert "namespace models" in error
    assert Stream(cluster.server).answer() == (TEXT, ["stop"])
    cluster.publish("b", second)
    cluster.api.denied = set()
    cluster.until_known(first, second)
    cluster.server.until(lambda: not cluster.trouble)


def test_a_token_that_is_replaced_is_read_again(cluster: Cluster) -> None:
    first, second = cluster.start_pod(SPEAKING), cluster.start_pod(SPEAKING)
    cluster.publish("a", first)
    cluster.until_known(first)
    cluster.until_watched()
    cluster.api.tokens = {"second"}
    cluster.api.end()
    cluster.server.until(lambda: "answers 401" in cluster.trouble)
    cluster.publish("b", second)
    (cluster.credentials / "token").write_text("second")
    cluster.until_known(first, second)
    cluster.until_watched()
    (cluster.credentials / "token").unlink()
    cluster.api.tokens.add("")  # so that only the credentials can fail
    (cluster.credentials / "token").mkdir()
    cluster.api.end()
    failed = '{reason="credentials",source="kubernetes"}'
    cluster.server.until(lambda: "token" in cluster.trouble)
    assert cluster.counted("plait_discovery_failures_total", failed) >= 1
    cluster.until_known(first, second)


def test_an_api_that_does_not_answer_holds_nobody_up(cluster: Cluster) -> None:
    cluster.api.is_open.clear()
    cluster.api.forget()
    cluster.server.until(lambda: cluster.api.num_asked("list") >= 1)
    static = cluster.server.add_worker(SPEAKING)
    found = cluster.start_pod(SPEAKING)
    cluster.publish("a", found)
    assert Stream(cluster.server).answer() == (TEXT, ["stop"])
    cluster.api.is_open.set()
    cluster.until_known(static, found)


def test_a_list_in_pages_is_read_to_its_end_also_where_watching_is_denied(
    cluster: Cluster,
) -> None:
    cluster.api.page_items = 2
    cluster.api.denied = {"watch"}
    workers = [cluster.start_pod(SPEAKING) for _ in range(3)]
    for number, worker in enumerate(workers):
        cluster.publish(f"slice-{number}", worker)
    cluster.api.end()
    cluster.until_known(*workers)


def test_services_of_others_and_slices_without_endpoints_are_left_alone(cluster: Cluster) -> None:
    theirs, ours = cluster.start_pod(SPEAKING), cluster.start_pod(SPEAKING)
    host, port = place_of(theirs)
    cluster.api.put("theirs", port, [endpoint(host)], service="other")
    cluster.api.put("empty", 7000, None)
    cluster.publish("ours", ours)
    cluster.until_known(ours)


def test_a_port_that_the_service_does_not_have_is_said(cluster: Cluster) -> None:
    worker = cluster.start_pod(SPEAKING)
    host, port = place_of(worker)
    cluster.api.put("a", port, [endpoint(host)], port_name="grpc")
    cluster.server.until(lambda: cluster.trouble != "")
    assert cluster.shown_error().endswith("no TCP port named control; it has grpc, metrics")
    cluster.publish("a", worker)
    cluster.until_known(worker)


def test_what_is_no_event_is_an_error_and_the_watch_begins_anew(cluster: Cluster) -> None:
    worker = cluster.start_pod(SPEAKING)
    cluster.server.until(lambda: cluster.api.num_watches == 1)
    cluster.api._say(b'{"type": "ADDED", "object": {"metadata": 5}}\n')
    cluster.server.until(lambda: cluster.api.num_asked("watch") >= 2)
    cluster.publish("a", worker)
    cluster.until_known(worker)
    wrong = '{reason="answer",source="kubernetes"}'
    assert cluster.counted("plait_discovery_failures_total", wrong) == 1


def test_an_api_that_comes_later_is_found(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    kubernetes = KubernetesApi(f"http://127.0.0.1:{port}", credentials_in(tmp_path))
    source = KubernetesSource(kubernetes, kubernetes_service(ITEM), ITEM, first_delay_s=0.01)
    with serving() as server, discovering(server, [ITEM], {ITEM: source}):
        server.until(lambda: f"http://127.0.0.1:{port}" in server.client.roster.places[0].error)
        with contextlib.closing(FakeApi(port=port)) as api:
            cluster = Cluster(api, server, tmp_path)
            worker = cluster.start_pod(SPEAKING)
            cluster.publish("a", worker)
            cluster.until_known(worker)


def test_the_api_is_known_by_the_certificate_of_the_cluster(tmp_path: Path) -> None:
    certificate = Path(__file__).with_name("api.pem")
    folder = credentials_in(tmp_path)
    with serving() as server, contextlib.closing(FakeApi(certificate=str(certificate))) as api:
        source = KubernetesSource(
            KubernetesApi(api.url, folder), kubernetes_service(ITEM), ITEM, first_delay_s=0.01
        )
        cluster = Cluster(api, server, folder)
        worker = cluster.start_pod(SPEAKING)
        cluster.publish("a", worker)
        with discovering(server, [ITEM], {ITEM: source}):
            server.until(
                lambda: "CERTIFICATE_VERIFY_FAILED" in server.client.roster.places[0].error
            )
            assert api.asked == []
            (folder / "ca.crt").write_text(certificate.read_text())  # its key is not read
            cluster.until_known(worker)


def test_outside_of_a_cluster_it_is_said_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected --kubernetes-api URL"):
        KubernetesApi(None, tmp_path, {})
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert KubernetesApi(None, tmp_path, inside).url == "https://[fd00::1]:6443"
    api = KubernetesApi("http://127.0.0.1:8001/", tmp_path)
    with pytest.raises(ConfigError, match=r"expected k8s://SERVICE\.NAMESPACE:PORT"):
        KubernetesSource(api, kubernetes_service(ITEM), ITEM)
    named = f"k8s://{SERVICE}.prod:7000"
    KubernetesSource(api, kubernetes_service(named), named)


def test_one_worker_under_two_addresses_is_one(cluster: Cluster) -> None:
    worker = cluster.start_pod(SPEAKING, "0.0.0.0")
    port = place_of(worker)[1]
    cluster.api.put("a", port, [endpoint("127.0.0.1"), endpoint("127.0.0.2")])
    fleet = cluster.server.client.fleet
    cluster.server.until(
        lambda: len(fleet) == 1 and len(cluster.server.client.roster.addresses) == 1
    )
    assert Stream(cluster.server).answer() == (TEXT, ["stop"])
    assert json.loads(cluster.server.http.get("/status").text)["absent"] == []
