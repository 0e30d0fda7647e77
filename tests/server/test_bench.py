"""`plait bench` against a scripted server: what it sends, how it counts, what it writes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench import runner, workload
from server.bench.client import RequestResult
from server.bench.options import BenchOptions, Span, from_args
from server.bench.summary import summarise
from server.options.config import ConfigError
from server.verbs import main

PIECES = re.compile(r"\s*\S+|\s+$")  # the scripted tokenizer: a word with the space before it


class ScriptedServer:
    """Answers like an OpenAI server; keeps what it was asked. `script` picks the behaviour."""

    def __init__(self) -> None:
        self.script = "answer"
        self.bodies: list[dict[str, object]] = []
        self.keys: list[str | None] = []
        self.has_tokenize = True
        self.meeting: threading.Barrier | None = None  # so many requests must be there at once
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def _handler(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self._json(200, {"data": [{"id": "toy"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize" and server.has_tokenize:
                    self._json(200, {"tokens": _tokenize(body["prompt"])})
                elif self.path == "/detokenize" and server.has_tokenize:
                    self._json(200, {"prompt": "".join(map(_WORDS.__getitem__, body["tokens"]))})
                elif self.path.startswith("/v1/"):
                    server.bodies.append(body)
                    server.keys.append(self.headers["Authorization"])
                    self._generate(body)
                else:
                    self._json(404, {"error": {"message": "no such route"}})

            def _generate(self, body: dict[str, object]) -> None:
                if server.meeting is not None:
                    server.meeting.wait()
                if server.script == "busy":
                    self._json(503, {"error": {"message": "busy"}})
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                is_chat = "messages" in body
                for text in ("", "one", " two", ""):
                    key = {"delta": {"content": text}} if is_chat else {"text": text}
                    self._event({"choices": [{"index": 0, "finish_reason": None} | key]})
                if server.script == "error":
                    self._event({"error": {"message": "lost", "code": "worker_lost"}})
                elif server.script == "cut":
                    return
                else:
                    end = {"delta": {}} if is_chat else {"text": ""}
                    self._event({"choices": [{"index": 0, "finish_reason": "length"} | end]})
                    usage = {"prompt_tokens": 10, "completion_tokens": body["max_tokens"]}
                    details = {"prompt_tokens_details": {"cached_tokens": 4}}
                    self._event({"choices": [], "usage": usage | details})
                self.wfile.write(b"data: [DONE]\n\n")

            def _event(self, value: object) -> None:
                self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

            def _json(self, status: int, value: object) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler


_WORDS: list[str] = []
_IDS: dict[str, int] = {}


def _tokenize(text: str) -> list[int]:
    words = PIECES.findall(text)
    for word in words:
        if word not in _IDS:
            _IDS[word] = len(_WORDS)
            _WORDS.append(word)
    return [_IDS[word] for word in words]


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


def options(server: ScriptedServer, **changes: object) -> BenchOptions:
    values = {"base_url": server.url, "num_requests": 4, "num_warmup": 1} | changes
    return BenchOptions(**values)  # type: ignore[arg-type]


def test_percentiles_rates_and_shares_are_those_worked_out_by_hand() -> None:
    results = [
        RequestResult(0.0, 4.0, [1.0, 2.0, 4.0], 100, 50, 5, "stop"),
        RequestResult(1.0, 5.0, [3.0, 3.5], 300, 50, 3, "length"),
        RequestResult(2.0, 8.0, [2.5], 0, 0, 0, None, "HTTP 503"),
    ]
    summary = summarise(results)
    assert summary.num_requests == 3
    assert summary.num_failed == 1
    assert summary.errors == {"HTTP 503": 1}
    assert summary.duration_s == 8.0
    assert summary.output_tokens_per_s == 8 / 8.0
    assert summary.requests_per_s == 2 / 8.0
    assert summary.cached_share == 100 / 400
    assert summary.ttft_s is not None and summary.itl_s is not None
    assert summary.tpot_s is not None and summary.e2e_s is not None
    assert (summary.ttft_s.mean, summary.ttft_s.p50) == (1.5, 1.5)
    assert summary.ttft_s.p90 == pytest.approx(1.9)
    assert summary.itl_s.mean == pytest.approx((1 + 2 + 0.5) / 3)
    assert summary.itl_s.p50 == 1.0
    assert summary.tpot_s.mean == pytest.approx((3 / 4 + 0.5 / 2) / 2)
    assert (summary.e2e_s.mean, summary.e2e_s.p99) == (4.0, 4.0)


def test_a_run_without_any_success_has_no_latencies() -> None:
    summary = summarise([RequestResult(0.0, 1.0, error="ConnectError")])
    assert summary.ttft_s is None
    assert summary.output_tokens_per_s == 0
    with pytest.raises(ValueError, match="no results"):
        summarise([])


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=20))
def test_the_gaps_and_the_first_piece_add_up_to_the_answer(gaps: list[float]) -> None:
    times = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    summary = summarise([RequestResult(0.0, times[-1], times, 1, 0, len(times), "stop")])
    num_gaps = len(gaps) - 1
    assert summary.ttft_s is not None and summary.e2e_s is not None
    itl_s = summary.itl_s.mean if summary.itl_s else 0.0
    assert summary.ttft_s.mean + num_gaps * itl_s == pytest.approx(summary.e2e_s.mean)


async def test_warm_up_is_sent_and_not_counted(scripted: ScriptedServer) -> None:
    model, results = await runner.run(options(scripted, output_tokens=Span(7, 7)))
    assert model == "toy"
    assert len(scripted.bodies) == 5
    assert len(results) == 4
    assert all(r.error is None and len(r.chunk_times_s) == 2 for r in results)
    summary = summarise(results)
    assert summary.output_tokens == 4 * 7
    assert summary.cached_share == 0.4


async def test_prompts_have_the_wanted_number_of_tokens(scripted: ScriptedServer) -> None:
    await runner.run(options(scripted, prompt_tokens=Span(5, 9), num_requests=12, seed=3))
    lengths = [len(_tokenize(str(body["prompt"]))) for body in scripted.bodies]
    assert all(5 <= length <= 9 for length in lengths)
    assert len(set(lengths)) > 1


async def test_equal_seeds_send_equal_requests(scripted: ScriptedServer) -> None:
    runs = []
    for seed in (1, 1, 2):
        scripted.bodies.clear()
        await runner.run(options(scripted, seed=seed, output_tokens=Span(1, 50)))
        runs.append([(body["prompt"], body["max_tokens"]) for body in scripted.bodies])
    assert runs[0] == runs[1] != runs[2]


async def test_sharing_requests_start_alike_and_the_others_do_not(
    scripted: ScriptedServer,
) -> None:
    shared = options(
        scripted,
        prompt_tokens=Span(30, 30),
        shared_prefix_tokens=20,
        shared_prefix_share=0.5,
        num_requests=30,
    )
    await runner.run(shared)
    heads = [tuple(_tokenize(str(body["prompt"]))[:19]) for body in scripted.bodies]
    most_common = max(heads, key=heads.count)
    assert 5 <= heads.count(most_common) <= 26
    others = [head for head in heads if head != most_common]
    assert len(set(others)) == len(others)


async def test_without_tokenize_lengths_are_estimated(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.has_tokenize = False
    await runner.run(options(scripted, prompt_tokens=Span(10, 10)))
    assert {len(str(body["prompt"])) for body in scripted.bodies} == {40}
    assert "estimates" in capsys.readouterr().err


async def test_so_many_requests_are_in_flight_as_concurrency_says(
    scripted: ScriptedServer,
) -> None:
    scripted.meeting = threading.Barrier(3, timeout=30)
    load = options(scripted, concurrency=3, num_requests=9, num_warmup=0)
    _, results = await runner.run(load)
    assert [r.error for r in results] == [None] * 9


async def test_arrivals_are_drawn_around_the_asked_rate(scripted: ScriptedServer) -> None:
    load = options(scripted, request_rate=50.0, num_requests=400, num_warmup=2)
    async with runner.connect(load) as http:
        cutter = workload.TextCutter(http, "toy", "some words " * 100)
        cutter.is_exact = False
        jobs = await workload.make_jobs(load, cutter, "some words " * 100)
    arrivals = [job.arrival_s for job in jobs[2:]]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    assert 399 / arrivals[-1] == pytest.approx(50, rel=0.2)  # 4 standard deviations


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("busy", "HTTP 503"),
        ("error", "stream error worker_lost"),
        ("cut", "stream cut short"),
    ],
)
def test_failures_are_counted_by_kind_and_fail_the_run(
    scripted: ScriptedServer, script: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.script = script
    code = main(["bench", "--base-url", scripted.url, "--num-requests", "2", "--warmup", "0"])
    assert code == 1
    assert f"failed: {error}" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--base-url", "http://127.0.0.1:1"]) == 1
    assert "--base-url http://127.0.0.1:1: ConnectError" in capsys.readouterr().err


def test_json_and_plot_are_written(
    scripted: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, picture = tmp_path / "out" / "run.json", tmp_path / "out" / "run.png"
    argv = ["bench", "--base-url", scripted.url + "/v1", "--num-requests", "3", "--ignore-eos"]
    argv += ["--endpoint", "chat", "--api-key", "hidden", "--concurrency", "2"]
    assert main([*argv, "--json", str(report), "--plot", str(picture)]) == 0
    content = json.loads(report.read_text())
    assert content["run"]["model"] == "toy"
    assert content["summary"]["num_requests"] == 3
    assert len(content["requests"]) == 3
    assert "hidden" not in report.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert set(scripted.keys) == {"Bearer hidden"}
    assert all(body["ignore_eos"] is True and "messages" in body for body in scripted.bodies)
    out = capsys.readouterr().out
    assert "TTFT" in out and "output tokens/s" in out and "40.0%" in out


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("prompt_tokens", "9:5"),
        ("prompt_tokens", "many"),
        ("output_tokens", "0"),
        ("concurrency", "0"),
        ("request_rate", "0"),
        ("request_rate", "nan"),
        ("num_requests", "1.5"),
        ("endpoint", "embeddings"),
        ("shared_prefix_share", "2"),
        ("shared_prefix_tokens", "256"),
        ("base_url", "localhost:8000"),
    ],
)
def test_a_bad_option_names_flag_and_value(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} {value}.*expected"):
        from_args({flag: value})


def test_a_rate_alone_sets_no_limit_on_concurrency() -> None:
    assert from_args({}).concurrency == 1
    assert from_args({"request_rate": "3"}).concurrency is None
