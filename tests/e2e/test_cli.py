"""The `plait` command as a user runs it: real processes, a tiny random model, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.model.fingerprint import fingerprint
from tests.served import LINE_TIMEOUT_S, PLAIT, READY, Running, serving
from tests.tiny import save_llama

pytestmark = pytest.mark.e2e

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("models") / "tiny", vocab_size=260)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def long_answer(max_tokens: int) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PLAIT, *argv], capture_output=True, text=True, check=False)


def test_plait_alone_prints_its_verbs() -> None:
    done = run()
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("serve", "pull", "bench", "--version"))


def test_version_is_printed() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"plait \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--port", "70000"], "plait serve: --port 70000: expected a whole number"),
        (["serve", "--config", "/nowhere.yaml"], "plait serve: --config /nowhere.yaml"),
        (["pull", "owner/name", "--force"], "plait pull: --force: only for the default model"),
        (["bench", "--output-tokens", "none"], "plait bench: --output-tokens none: expected"),
    ],
)
def test_a_bad_option_is_a_message_and_code_2(argv: list[str], message: str) -> None:
    done = run(*argv)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_without_its_probes_does_not_start(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listen = ["--listen", f"ipc://{tmp_path}/w", "--health-address", address]
        done = run("decode", "--model", str(tiny_model), "--device", "cpu", *listen)
    assert done.returncode == 2
    assert f"--health-address {address}: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--port", "0", "--model", "nowhere"],
        ["frontend", "--port", "0", "--workers", "tcp://127.0.0.1:9", "--model", "nowhere"],
        ["prefill", "--model", "nowhere"],
        ["decode", "--model", "nowhere"],
        ["prefill-check", "--model", "nowhere"],
        ["pull", "nowhere"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_model_that_is_nowhere_is_a_message_of_the_verb_and_code_1(argv: list[str]) -> None:
    done = run(*argv)
    assert done.returncode == 1
    assert f"plait {argv[0]}: --model nowhere: no such folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_front_end_never_loads_torch() -> None:
    code = "import sys, server.launcher, server.bench.runner; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_worker_that_cannot_load_ends_plait_with_its_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (broken / name).write_bytes((tiny_model / name).read_bytes())
    done = run("serve", "--colocated", "--port", "0", "--device", "cpu", "--model", str(broken))
    assert done.returncode == 1
    assert "safetensors" in done.stderr  # the worker's own words
    assert "plait serve: colocated 0 cannot start; its error is above" in done.stderr


def test_serve_answers_the_printed_line_replaces_a_killed_worker_and_drains(
    tiny_model: Path,
) -> None:
    with serving(tiny_model, "--colocated", "--drain-timeout-s", "600") as served:
        first = served.wait_ready()
        words = shlex.split(served.wait_for(re.compile(r"curl .*"))[0])
        headers = dict([words[words.index("-H") + 1].split(": ")])
        short = json.dumps(json.loads(words[-1]) | {"max_tokens": 8})
        answer = httpx.post(words[1], content=short, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 8
        assert httpx.get(f"{served.url}/ready").status_code == 200
        assert psutil.Process(served.process.pid).cmdline()[0] == "plait frontend"
        assert [worker.cmdline()[0] for worker in served.workers()] == ["plait colocated 0"]

        os.kill(first, signal.SIGKILL)
        second = int(served.wait_for(READY)[1])
        assert second != first

        url, body = f"{served.url}/v1/completions", long_answer(1000)
        with httpx.stream("POST", url, json=body, timeout=120) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            served.send(signal.SIGTERM)
            served.wait_for(re.compile("draining 1 requests"))
            assert httpx.get(f"{served.url}/live").status_code == 200
            assert httpx.get(f"{served.url}/ready").status_code == 503
            assert httpx.post(url, json=body | {"stream": False}).status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert served.wait() == 0
        assert not psutil.pid_exists(second)


def test_a_process_whose_parent_holds_signals_back_ends_when_it_is_asked(tiny_model: Path) -> None:
    held = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        argv = ["--model", str(tiny_model), "--port", "0", "--workers", "tcp://127.0.0.1:9"]
        front_end = Running("frontend", *argv)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
    with contextlib.closing(front_end):
        front_end.wait_for(re.compile("workers at"))
        front_end.send(signal.SIGTERM)
        assert front_end.wait() in (0, 128 + signal.SIGTERM)  # the latter: it was starting


@pytest.mark.parametrize(
    ("verb", "module"),
    [
        ("serve", "pydantic"),  # for the options
        ("serve", "uvicorn"),
        ("frontend", "uvicorn"),
        ("prefill", "uvicorn"),
        ("prefill", "torch"),  # by the worker that the command has become
        ("decode", "torch"),
    ],
)
def test_a_process_that_still_imports_ends_when_it_is_asked(
    verb: str, module: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that inherits SIGTERM ignored, as to the kernel a container's first process is."""
    stops = 'import signal\nprint("stopped here", flush=True)\nwhile True:\n    signal.pause()\n'
    (tmp_path / f"{module}.py").write_text(stops)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    argv = ["--model", str(tiny_model), "--device", "cpu"]
    if verb == "frontend":
        argv = ["--model", str(tiny_model), "--workers", "tcp://127.0.0.1:9"]
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        running = Running(verb, *argv)
    finally:
        signal.signal(signal.SIGTERM, before)
    with contextlib.closing(running):
        running.wait_for(re.compile("stopped here"))
        running.send(signal.SIGTERM)
        assert running.wait() == (0 if module == "torch" else 128 + signal.SIGTERM)


def test_a_worker_of_another_model_is_refused_by_the_front_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    other = save_llama(tmp_path / "other", vocab_size=260, seed=1)
    address = f"ipc://{tmp_path}/w"
    argv = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "1024"]
    worker = Running("decode", "--model", str(other), "--listen", address, *argv)
    argv = ["--model", str(tiny_model), "--port", "0", "--workers", address]
    front_end = Running("frontend", *argv)
    with contextlib.closing(worker), contextlib.closing(front_end):
        line = front_end.wait_for(re.compile(r"decode worker at \S+ is refused: .*"))[0]
        assert fingerprint(other) in line and fingerprint(tiny_model) in line
        for running in (front_end, worker):
            running.send(signal.SIGTERM)
            assert running.wait() == 0


def test_what_is_not_done_at_the_end_of_the_drain_gets_an_error_chunk(tiny_model: Path) -> None:
    with serving(tiny_model, "--colocated", "--drain-timeout-s", "0") as served:
        worker = psutil.Process(served.wait_ready())
        url, body = f"{served.url}/v1/completions", long_answer(1000)
        with httpx.stream("POST", url, json=body, timeout=120) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            served.send(signal.SIGINT)
            rest = [line for line in lines if line]
        assert "error" in json.loads(rest[-2][6:])
        assert rest[-1] == "data: [DONE]"
        assert served.wait() == 0
        assert not worker.is_running()


def test_a_second_interrupt_ends_at_once_and_a_killed_front_end_leaves_no_worker(
    tiny_model: Path,
) -> None:
    with serving(tiny_model, "--colocated", "--drain-timeout-s", "600") as served:
        worker = psutil.Process(served.wait_ready())
        url, body = f"{served.url}/v1/completions", long_answer(1000)
        with httpx.stream("POST", url, json=body, timeout=120) as stream:
            lines = stream.iter_lines()  # kept: without it the connection would be closed
            assert next(lines).startswith("data: ")
            served.send(signal.SIGINT)
            served.wait_for(re.compile("draining"))
            served.send(signal.SIGINT)
            assert served.wait() == 130
        worker.wait(LINE_TIMEOUT_S)

    # Killed while its worker still loads: the worker has not even met the front end.
    with serving(tiny_model, "--colocated") as served:
        served.wait_for(re.compile(r"plait \d.* from "))
        while not (workers := served.workers()):
            pass
        served.send(signal.SIGKILL)
        assert served.wait() == -signal.SIGKILL
        gone, alive = psutil.wait_procs(workers, timeout=LINE_TIMEOUT_S)
        assert gone and not alive
