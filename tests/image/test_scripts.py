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


def healthcheck(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(ROOT / "scripts/healthcheck.py")]
    return subprocess.run(command, env=variables, text=True, capture_output=True, check=False)


def test_healthy_while_live_answers_200():
    with listener(200) as port:
        assert healthcheck(PLAIT_PORT=str(port)).returncode == 0
        found = healthcheck(PLAIT_PORT="1", PLAIT_HEALTH_ADDRESS=f"127.0.0.1:{port}")
        assert found.returncode == 0, found.stderr
        assert healthcheck(PLAIT_HEALTH_ADDRESS=f"0.0.0.0:{port}").returncode == 0


def test_unhealthy_otherwise_and_it_says_why():
    with listener(503) as port:
        assert healthcheck(PLAIT_PORT=str(port)).returncode == 1
    closed = healthcheck(PLAIT_PORT=str(port))
    assert closed.returncode == 1 and f":{port}/live" in closed.stderr
    assert healthcheck(PLAIT_HEALTH_ADDRESS="nonsense").returncode == 1


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


def test_build_asks_the_engine_for_the_target_with_tags_labels_and_what_was_added(engine):
    done = image_script(
        "gpu", "--build-arg", "PIP_ARGS=--pre", ENGINE=str(engine), IMAGE="registry.example/plait"
    )
    assert done.returncode == 0, done.stderr
    asked = done.stdout.splitlines()
    assert asked[:3] == ["build", "--target", "gpu"]
    assert asked.count("--tag") == 2 and "registry.example/plait:gpu" in asked
    assert [a for a in asked if a.startswith(("VERSION=0", "CREATED=20"))]
    assert asked[-3:] == ["--build-arg", "PIP_ARGS=--pre", "."]


def test_no_engine_is_said_and_a_wrong_target_refused(tmp_path):
    done = image_script("cpu", ENGINE=str(tmp_path / "docker"))
    assert done.returncode == 1 and f"{tmp_path}/docker" in done.stderr and "ENGINE=" in done.stderr
    done = image_script("tpu")
    assert done.returncode == 2 and "cpu|gpu" in done.stderr
