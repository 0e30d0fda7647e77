"""A request's span in the front end, what workers are told of it, and one trace over processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.tracing import OtlpTracer, traces_url
from server.generation import Limits
from server.options.arguments import parse
from server.options.config import ConfigError
from server.topology import worker_config
from tests.collector import Collector, Received, collecting
from tests.served import serving as serving_processes
from tests.server.scripted import MODEL_NAME, Server, reply, serving
from tests.server.stream import BODY, CHAT, SPOKEN, Stream, stalling

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAGES = ["reserve", "receive", "queue", "prefill", "handoff", "decode"]


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    with collecting() as it:
        yield it


@pytest.fixture
def tracer(collector: tuple[Collector, str]) -> OtlpTracer:
    url = traces_url(collector[1])
    assert url is not None
    return OtlpTracer(url, "plait-frontend", "1", {"gen_ai.request.model": MODEL_NAME})


def spans_of(server: Server, tracer: OtlpTracer, found: Collector) -> list[Received]:
    """All of them, once no request is unfinished."""
    server.until(lambda: len(server.client.requests) == 0)
    tracer.close()
    return found.spans


def test_a_request_in_the_clients_trace(
    collector: tuple[Collector, str], tracer: OtlpTracer
) -> None:
    with serving(tracer=tracer) as server:
        prefill = server.add_worker(reply(SPOKEN), role="prefill")
        decode = server.add_worker(reply(SPOKEN), role="decode")
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        body = {**BODY, "max_tokens": 4}
        usage = server.http.post(CHAT, json=body, headers=headers).json()["usage"]
        (span,) = spans_of(server, tracer, collector[0])
        asked, passed_on = decode.submits.get(timeout=60), prefill.prefills.get(timeout=60)
    assert (span.name, span.service) == ("request", "plait-frontend")
    assert (span.trace_id, span.parent_id, span.error) == (TRACE, SPAN, None)
    assert asked.traceparent == passed_on.traceparent == f"00-{span.ids}-01"
    assert span.attributes == {
        "plait.rid": asked.request.rid,
        "plait.replays": 0,
        "gen_ai.request.model": MODEL_NAME,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "http.route": CHAT,
    }


def test_choices_of_one_request_share_the_clients_trace_only(
    collector: tuple[Collector, str], tracer: OtlpTracer
) -> None:
    with serving(tracer=tracer) as server:
        server.add_worker(reply(SPOKEN))
        server.http.post(CHAT, json={**BODY, "n": 2})
        own = list(spans_of(server, tracer, collector[0]))
    assert len({span.trace_id for span in own}) == len(own) == 2
    assert {span.parent_id for span in own} == {""}


def test_a_replay_goes_on_in_the_same_span(
    collector: tuple[Collector, str], tracer: OtlpTracer
) -> None:
    with serving(tracer=tracer) as server:
        script, reached = stalling(3)
        lost = server.add_worker(script)
        stream = Stream(server)
        assert reached.wait(60)
        heir = server.add_worker(reply(SPOKEN))
        lost.vanish()
        assert stream.answer()[1] == ["stop"]
        (span,) = spans_of(server, tracer, collector[0])
        given = [worker.submits.get(timeout=60).traceparent for worker in (lost, heir)]
        metrics = server.http.get("/metrics").text
    assert [parent[3:-3] for parent in given] == [span.ids] * 2
    assert span.attributes["plait.replays"] == 1
    ((name, attributes),) = span.events
    assert name == "replay"
    assert "has broken the connection" in attributes["plait.reason"]
    assert 'plait_replays_total{reason="lost"} 1.0' in metrics
    assert 'plait_replays_total{reason="handed_back"} 0.0' in metrics
    assert 'plait_router_choices_total{role="colocated"} 2.0' in metrics


def test_a_request_that_fails_says_why(
    collector: tuple[Collector, str], tracer: OtlpTracer
) -> None:
    with serving(Limits(max_replays=0), tracer=tracer) as server:
        script, reached = stalling(2)
        worker = server.add_worker(script)
        stream = Stream(server)
        assert reached.wait(60)
        worker.hand_back(worker.submits.get(timeout=60), "the worker is shutting down")
        assert "error" in stream.values()[-1]
        (span,) = spans_of(server, tracer, collector[0])
    assert "the worker is shutting down" in (span.error or "")
    assert span.attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_a_collector_that_is_down_does_not_show(
    collector: tuple[Collector, str], tracer: OtlpTracer
) -> None:
    collector[0].answer = 503
    with serving(tracer=tracer) as server:
        server.add_worker(reply(SPOKEN))
        for _ in range(3):
            assert server.http.post(CHAT, json=BODY).status_code == 200
        server.until(lambda: len(server.client.requests) == 0)
        tracer.close()
    assert collector[0].spans == []


def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    assert parse([]).traces_url is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://standard:4318")
    assert parse([]).traces_url == "http://standard:4318/v1/traces"
    monkeypatch.setenv("PLAIT_OTLP_ENDPOINT", "http://ours:4318")
    assert parse([]).traces_url == "http://ours:4318/v1/traces"
    given = parse(["--otlp-endpoint", "https://flag"])
    assert given.traces_url == "https://flag/v1/traces"
    told = worker_config(given, "decode", 0, model_path=Path(), listen_address="", cp_size=1)
    assert told.traces_url == given.traces_url
    with pytest.raises(ConfigError, match="--otlp-endpoint collector:4317: expected http"):
        parse(["--otlp-endpoint", "collector:4317"])


def test_without_an_endpoint_no_exporter_is_imported() -> None:
    """FastAPI itself imports OpenTelemetry's interface, which does nothing alone."""
    code = (
        "import sys, server.launcher;"
        "print([m for m in sys.modules"
        " if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf'))])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={})
    assert done.stdout.strip() == "[]"


@pytest.mark.e2e
def test_one_trace_over_all_processes(
    tiny_dsa: Path, collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, url = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms
    with serving_processes(tiny_dsa, "--prefill-cp-size", "1") as served:
        served.wait_ready()
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi " * 200}]}
        body |= {"model": served.model, "max_tokens": 6, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        answer = httpx.post(f"{served.url}{CHAT}", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        spans = found.wait_for(lambda spans: len(spans) == 1 + len(STAGES))
        served.stop()
    request = found.named("request")
    assert {span.trace_id for span in spans} == {TRACE}
    assert request.parent_id == SPAN
    children = [span for span in spans if span is not request]
    assert {span.parent_id for span in children} == {request.span_id}
    assert sorted(span.name for span in children) == sorted(STAGES)
    assert {span.attributes["plait.rid"] for span in spans} == {request.attributes["plait.rid"]}
    assert [span.error for span in spans] == [None] * len(spans)
    assert {span.name: span.service for span in spans} == {
        "request": "plait-frontend",
        **dict.fromkeys(("queue", "prefill", "handoff"), "plait-prefill"),
        **dict.fromkeys(("reserve", "receive", "decode"), "plait-decode"),
    }
