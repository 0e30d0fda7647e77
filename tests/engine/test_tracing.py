"""Spans as a collector receives them: from a tracer, and from the stages of a real hand-off."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.messages import Abort
from engine.tracing import NO_TRACER, OtlpTracer, Tracer, open_tracer, traces_url
from kvcache.transfer.loopback import LoopbackNetwork
from tests.collector import Collector, collecting
from tests.engine.handoff.pair import FRONT, Pair
from tests.tiny import save_dsa

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
PAGE = 64
POOL = {"max_total_tokens": 16 * PAGE, "chunked_prefill_size": 100}
STAGES = {
    "plait-decode": ["reserve", "receive", "decode"],
    "plait-prefill": ["queue", "prefill", "handoff"],
}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    with collecting() as it:
        yield it


def tracer_to(url: str, service: str = "plait-test") -> OtlpTracer:
    tracer = open_tracer(
        traces_url(url), service=service, instance="1", common={"gen_ai.request.model": "m"}
    )
    assert isinstance(tracer, OtlpTracer)
    return tracer


def test_a_span_and_its_child_as_the_collector_gets_them(
    collector: tuple[Collector, str],
) -> None:
    found, url = collector
    tracer = tracer_to(url)
    before_ns = time.time_ns()
    span = tracer.start("request", PARENT)
    span.event("replay", {"plait.reason": "lost"})
    now = time.monotonic()
    queued = {"plait.rid": "r"}
    tracer.write("queue", span.traceparent, now - 1001.5, now - 1000, queued, "it broke")
    span.end({"n": 3, "reasons": ["stop"]})
    tracer.close()

    request, queue = found.named("request"), found.named("queue")
    assert found.paths == ["/v1/traces"]
    assert (request.trace_id, request.parent_id) == (TRACE, SPAN)
    assert (queue.trace_id, queue.parent_id) == (TRACE, request.span_id)
    assert span.traceparent == f"00-{request.ids}-01"
    assert request.attributes == {"n": 3, "reasons": ["stop"], "gen_ai.request.model": "m"}
    assert request.events == [("replay", {"plait.reason": "lost"})]
    assert (request.error, queue.error) == (None, "it broke")
    assert before_ns <= request.start_ns <= request.end_ns <= time.time_ns()
    assert abs(queue.end_ns - queue.start_ns - 1_500_000_000) <= 1000  # what a float keeps of ns
    assert queue.end_ns < request.end_ns
    assert {span.service for span in found.spans} == {"plait-test"}


@pytest.mark.parametrize("given", ["", "nonsense", PARENT[:-3], f"00-{'0' * 32}-{SPAN}-01"])
def test_without_a_good_parent_a_new_trace_begins(
    collector: tuple[Collector, str], given: str
) -> None:
    found, url = collector
    tracer = tracer_to(url)
    tracer.start("request", given).end({})
    tracer.close()
    assert found.named("request").trace_id not in ("", TRACE)
    assert found.named("request").parent_id == ""


def test_a_parent_that_is_not_sampled_is_followed(collector: tuple[Collector, str]) -> None:
    found, url = collector
    tracer = tracer_to(url)
    span = tracer.start("request", f"00-{TRACE}-{SPAN}-00")
    assert span.traceparent.startswith(f"00-{TRACE}-")
    assert span.traceparent.endswith("-00")
    tracer.write("queue", span.traceparent, 1.0, 2.0, {})
    tracer.write("queue", "", 1.0, 2.0, {})  # nor is what the front end does not trace
    span.end({})
    tracer.close()
    assert found.spans == []


@pytest.mark.parametrize(
    ("option", "variables", "url"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("http://c/otlp", {}, "http://c/otlp/v1/traces"),
        ("http://c:4318/v1/traces", {}, "http://c:4318/v1/traces"),
        (None, {"ENDPOINT": "http://e:4318"}, "http://e:4318/v1/traces"),
        (None, {"ENDPOINT": ""}, None),
        (None, {"ENDPOINT": "http://e", "TRACES_ENDPOINT": "http://t/x"}, "http://t/x"),
        ("http://c", {"ENDPOINT": "http://e", "TRACES_ENDPOINT": "http://t"}, "http://c/v1/traces"),
    ],
)
def test_where_traces_go(
    monkeypatch: pytest.MonkeyPatch, option: str | None, variables: dict[str, str], url: str | None
) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert traces_url(option) == url


def test_a_collector_that_refuses_is_told_of_once(
    collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    found, url = collector
    found.answer = 404
    caplog.set_level(logging.WARNING)
    tracer = tracer_to(url)
    for _ in range(3):
        tracer.start("request", "").end({})
        tracer.flush()
    found.answer = 200
    tracer.start("later", "").end({})
    tracer.close()
    assert [span.name for span in found.spans] == ["later"]
    assert len([record for record in caplog.records if url in record.getMessage()]) == 1


def test_a_tracer_that_cannot_be_made_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A provider of credentials that is not installed.
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobody")
    tracer = open_tracer("http://127.0.0.1:1", service="s", instance="i")
    assert tracer is NO_TRACER
    assert "nobody" in caplog.text


def test_without_an_address_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, engine.worker, engine.tracing as t;"
        "t.open_tracer(t.traces_url(None), service='s', instance='i').start('x', '').end({});"
        "print([m for m in sys.modules if m.split('.')[0] in ('opentelemetry', 'google')])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={})
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def dsa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dsa(tmp_path_factory.mktemp("dsa"))


@pytest.fixture
def traced(
    dsa: Path, collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    """A pair of workers, each with a tracer of its own as its process would have."""
    network = LoopbackNetwork()
    monkeypatch.setattr("engine.loading.MooncakeEngine", lambda host, protocol: network.engine())
    tracers: dict[str, Tracer] = {
        role: tracer_to(collector[1], f"plait-{role}") for role in ("prefill", "decode")
    }
    pair = Pair(dsa, prefill=POOL, decode=POOL, tracers=tracers)
    yield pair
    pair.close()


def send_spans(pair: Pair) -> None:
    for tracer in pair.tracers.values():
        tracer.close()


def test_a_handed_over_request_is_one_trace(traced: Pair, collector: tuple[Collector, str]) -> None:
    traced.submit("r", [*range(3, 180), *range(3, 30)], traceparent=PARENT, max_tokens=5)
    traced.submit("untraced", [5, 6, 7])
    traced.run()
    send_spans(traced)
    spans = collector[0].spans
    assert {(span.trace_id, span.parent_id) for span in spans} == {(TRACE, SPAN)}
    assert {span.attributes["plait.rid"] for span in spans} == {"r"}
    assert {span.attributes["plait.room"] for span in spans} == {"room-r-0"}
    for service, names in STAGES.items():
        its = [span for span in spans if span.service == service]
        assert [span.name for span in its] == names
        assert not any(span.error for span in its)


def test_what_ends_early_says_where_and_why(traced: Pair, collector: tuple[Collector, str]) -> None:
    found = collector[0]
    traced.submit("gone", list(range(3, 100)), traceparent=PARENT)
    traced.decode.turn()  # its pages are reserved
    traced.deliver()
    for node in (traced.prefill, traced.decode):
        node.inbox.take(FRONT, Abort("gone"))
    traced.run()
    traced.submit("refused", [10_000], traceparent=PARENT)
    traced.run()
    send_spans(traced)
    ends = {(s.service, s.attributes["plait.rid"], s.name): s.error for s in found.spans}
    assert ends["plait-decode", "gone", "receive"] == "abort"
    assert ends["plait-prefill", "gone", "queue"] == "abort"
    assert ends["plait-decode", "gone", "reserve"] is None
    assert "outside the vocabulary" in (ends["plait-decode", "refused", "reserve"] or "")
    assert len(ends) == 4
