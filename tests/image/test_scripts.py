"""The image's scripts: the health check against real listeners, the build against an engine that
only writes down what it is asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from scripts.healthcheck import address_of, command_of
from tests.image.dockerfile import ROOT


@contextmanager
def listener(status: int) -> Iterator[int]:
    """An HTTP server that answers /live with `status` and all else with 404; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/live" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


INIT = ["/usr/bin/tini", "--", "/opt/plait/bin/plait"]


@pytest.fixture
def healthcheck(tmp_path):
    """The check in a container whose command and variables these are."""

    def check(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        first = tmp_path / "cmdline"
        first.write_text("".join(f"{word}\0" for word in [*INIT, *command.split()]))
        script = [sys.executable, "-I", str(ROOT / "scripts/healthcheck.py"), str(first)]
        return subprocess.run(script, env=variables, text=True, capture_output=True, check=False)

    return check


def test_healthy_while_live_answers_200(healthcheck):
    with listener(200) as port:
        assert healthcheck("serve", PLAIT_PORT=str(port)).returncode == 0
        found = healthcheck(f"decode --health-address=0.0.0.0:{port} --model m", PLAIT_PORT="1")
        assert found.returncode == 0, found.stderr


def test_unhealthy_otherwise_and_it_says_why(healthcheck):
    with listener(503) as port:
        assert healthcheck("serve", PLAIT_PORT=str(port)).returncode == 1
        assert healthcheck(f"prefill --health-address 127.0.0.1:{port}").returncode == 1
    closed = healthcheck(f"frontend --port {port}")
    assert closed.returncode == 1 and f":{port}/live" in closed.stderr
    assert healthcheck("decode", PLAIT_HEALTH_ADDRESS="nonsense").returncode == 1


def test_a_worker_that_has_no_probes_is_not_called_unhealthy(healthcheck):
    for command in ("decode --model m", "pull", "prefill"):
        found = healthcheck(command, PLAIT_PORT="1")
        assert found.returncode == 0 and f"plait {command.split()[0]}: nothing" in found.stdout


SHARED = {"PLAIT_HOST": "0.0.0.0", "PLAIT_PORT": "8000", "PLAIT_HEALTH_ADDRESS": "[::]:7001"}


@pytest.mark.parametrize(
    ("command", "variables", "address"),
    [
        ("serve", {}, ":8000"),
        ("serve --port 9000 --host 10.0.0.7", SHARED, "10.0.0.7:9000"),
        ("frontend --port=1 --port=9000", SHARED, "0.0.0.0:9000"),
        ("frontend", SHARED, "0.0.0.0:8000"),  # one environment for all roles
        ("decode", SHARED, "[::]:7001"),
        ("prefill --health-address=10.0.0.8:7002", SHARED, "10.0.0.8:7002"),
        ("decode --health-address 10.0.0.8:7002", {}, "10.0.0.8:7002"),
        ("decode --health-address-of x --model --port", {"PLAIT_PORT": "9"}, None),
        ("", SHARED, "[::]:7001"),  # another entry point: by variables alone
        ("", {"PLAIT_PORT": "9000"}, ":9000"),
    ],
)
def test_flags_win_over_variables_and_each_verb_has_its_own(command, variables, address):
    assert address_of(command.split(), variables) == address


def test_an_entry_point_that_is_not_plait_is_known_by_nothing(tmp_path):
    first = tmp_path / "cmdline"
    assert command_of(first) == []
    for words in (["/bin/sh", "-c", "plait serve"], ["plait decode 0", "", ""], [""]):
        first.write_text("\0".join(words))
        assert command_of(first) == []
    first.write_text("/sbin/docker-init\0--\0plait\0serve\0--port\x001\0")
    assert command_of(first)[:3] == ["serve", "--port", "1"]


@pytest.fixture
def engine(tmp_path):
    """A stand-in for docker: prints its arguments, one a line."""
    path = tmp_path / "engine"
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return path


def image_script(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / "scripts/image.sh"), *args]
    environment = os.environ | variables
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)


def test_build_asks_the_engine_for_the_variant_with_tags_labels_and_what_was_added(engine):
    done = image_script(
        "gpu", "--build-arg", "PIP_ARGS=--pre", ENGINE=str(engine), IMAGE="registry.example/plait"
    )
    assert done.returncode == 0, done.stderr
    asked = done.stdout.splitlines()
    assert asked[:3] == ["build", "--build-arg", "VARIANT=gpu"]
    assert asked.count("--tag") == 2 and "registry.example/plait:gpu" in asked
    assert [a for a in asked if a.startswith(("VERSION=0", "CREATED=20"))]
    assert asked[-3:] == ["--build-arg", "PIP_ARGS=--pre", "."]


def test_no_engine_is_said_and_a_wrong_target_refused(tmp_path):
    done = image_script("cpu", ENGINE=str(tmp_path / "docker"))
    assert done.returncode == 1 and f"{tmp_path}/docker" in done.stderr and "ENGINE=" in done.stderr
    done = image_script("tpu")
    assert done.returncode == 2 and "cpu|gpu" in done.stderr
