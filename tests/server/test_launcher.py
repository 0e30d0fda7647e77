"""The supervisor's rules against scripted processes, and the launcher's small decisions."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import WorkerConfig
from server import http_server, launcher, model_source
from server.options.arguments import parse
from server.supervisor import (
    MAX_FAILED_STARTS,
    MAX_SILENT_LOOKS,
    Supervisor,
    WorkerFailedError,
    worker_command,
)

CONFIG = WorkerConfig(model="/none", listen_address="ipc:///none")
WAITS = "import signal; signal.pause()"
DEFIES = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(int(sys.argv[1]), b"x")
signal.pause()
"""


class Roster:
    """Stands for the client: processes are present once a test says so."""

    def __init__(self, says_hello: Callable[[int], bool] = lambda number: True) -> None:
        self._says_hello = says_hello
        self.pids: list[int] = []  # in order of their first look
        self.silent: set[int] = set()
        self.num_looks = 0
        self._num_heard = 0
        self._called = asyncio.Event()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Of what it was told and asked."""
        while not is_so():
            self._called.clear()
            await self._called.wait()

    def num_heard(self, pid: int) -> int | None:
        self._called.set()
        if pid not in self.pids:
            self.pids.append(pid)
        if not self._says_hello(self.pids.index(pid)):
            return None
        self.num_looks += 1
        self._num_heard += pid not in self.silent
        return self._num_heard


def supervisor(roster: Roster, script: str, look_s: float = 60.0) -> Supervisor:
    return Supervisor(
        CONFIG,
        roster.num_heard,
        command=lambda told: [sys.executable, "-S", "-c", script],
        first_delay_s=0.001,
        look_s=look_s,
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_worker_that_said_hello_is_replaced_when_it_dies() -> None:
    roster = Roster()
    watched = supervisor(roster, WAITS)
    running = asyncio.create_task(watched.run())
    await watched.ready.wait()
    first = watched.pid
    assert first is not None
    os.kill(first, 9)
    await roster.until(lambda: len(roster.pids) == 2)
    second = watched.pid
    assert second is not None and second != first
    assert watched.num_restarts == 1
    await watched.stop()
    await running
    assert not is_alive(second)


async def test_a_worker_that_falls_silent_is_killed_and_replaced() -> None:
    roster = Roster()
    watched = supervisor(roster, WAITS, look_s=0.001)
    running = asyncio.create_task(watched.run())
    await watched.ready.wait()
    first = watched.pid
    assert first is not None
    roster.silent.add(first)
    await roster.until(lambda: len(roster.pids) == 2)
    assert not is_alive(first)
    second = watched.pid
    assert second is not None
    await watched.stop()
    await running


async def test_a_worker_that_was_asked_to_end_is_not_killed_for_its_silence(tmp_path: Path) -> None:
    says, may_end = tmp_path / "says", tmp_path / "may_end"
    for pipe in (says, may_end):
        os.mkfifo(pipe)
    slow_to_end = f"""
import os, signal
says, may_end = os.open({str(says)!r}, os.O_WRONLY), os.open({str(may_end)!r}, os.O_RDONLY)
signal.signal(signal.SIGTERM, lambda *_: os.write(says, b"asked"))
os.write(says, b"ready")
os.read(may_end, 1)
os.write(says, b"ended")
"""
    roster = Roster()
    watched = supervisor(roster, slow_to_end, look_s=0.001)
    running = asyncio.create_task(watched.run())
    # Both ends of each: neither side waits for the other to open it, nor sees its end.
    heard, lets_end = (os.open(pipe, os.O_RDWR) for pipe in (says, may_end))

    async def hear() -> bytes:
        return await asyncio.to_thread(os.read, heard, len(b"ready"))

    assert await hear() == b"ready"
    await watched.ready.wait()
    stopping = asyncio.create_task(watched.stop())
    assert await hear() == b"asked"
    roster.silent.update(roster.pids)
    enough = roster.num_looks + 10 * MAX_SILENT_LOOKS
    looks = asyncio.create_task(roster.until(lambda: roster.num_looks >= enough))
    await asyncio.wait([looks, running], return_when=asyncio.FIRST_COMPLETED)
    looks.cancel()
    os.write(lets_end, b"x")
    await asyncio.gather(stopping, running)
    os.set_blocking(heard, False)
    assert await hear() == b"ended"
    os.close(heard)
    os.close(lets_end)


async def test_a_worker_that_is_heard_lives_on() -> None:
    roster = Roster()
    watched = supervisor(roster, WAITS, look_s=0.001)
    running = asyncio.create_task(watched.run())
    await watched.ready.wait()
    await roster.until(lambda: roster.num_looks >= 10 * MAX_SILENT_LOOKS)
    assert watched.num_restarts == 0
    await watched.stop()
    await running


async def test_deaths_before_the_hello_end_in_an_error() -> None:
    roster = Roster(says_hello=lambda number: False)
    watched = supervisor(roster, "raise SystemExit(7)")
    with pytest.raises(WorkerFailedError, match=f"{MAX_FAILED_STARTS} times.*exit code 7"):
        await watched.run()
    assert watched.num_restarts == MAX_FAILED_STARTS - 1
    assert not watched.ready.is_set()


async def test_a_worker_that_refuses_its_options_is_not_tried_again() -> None:
    watched = supervisor(Roster(lambda number: False), "raise SystemExit(2)")
    with pytest.raises(WorkerFailedError, match="cannot start"):
        await watched.run()
    assert watched.num_restarts == 0


async def test_a_worker_that_ignores_the_request_to_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.supervisor.KILL_AFTER_S", 0.01)
    started, says_started = os.pipe()
    os.set_inheritable(says_started, True)
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-S", "-c", DEFIES, str(says_started)], pass_fds=[says_started]
    )
    assert await asyncio.to_thread(os.read, started, 1) == b"x"
    watched = supervisor(Roster(), WAITS)
    watched._process = process
    await watched.stop()
    assert process.returncode == -9
    os.close(started)
    os.close(says_started)


async def test_stopping_between_two_lives_does_not_wait_for_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    roster = Roster(says_hello=lambda number: True)
    watched = Supervisor(
        CONFIG,
        roster.num_heard,
        command=lambda told: [sys.executable, "-S", "-c", WAITS],
        first_delay_s=3600.0,
    )
    running = asyncio.create_task(watched.run())
    await watched.ready.wait()
    assert watched.pid is not None
    os.kill(watched.pid, 9)
    while "restart in 3600.00 s" not in caplog.text:
        await asyncio.sleep(0)
    await watched.stop()
    await running
    assert watched.num_restarts == 0


def test_a_worker_gets_its_options_as_one_json_argument() -> None:
    command = worker_command(CONFIG)
    assert command[1:3] == ["-m", "engine"]
    assert json.loads(command[3])["model"] == "/none"


def test_the_curl_line_survives_a_shell_whatever_the_name() -> None:
    options = parse(["--served-model-name", 'it\'s "mine" $HOME', "--api-key", "hunter2"])
    words = shlex.split(launcher.curl_line(options, "http://127.0.0.1:1"))
    assert words[:2] == ["curl", "http://127.0.0.1:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == 'it\'s "mine" $HOME'
    assert any(word.startswith("Authorization: Bearer ") for word in words)
    assert "hunter2" not in " ".join(words)


def test_port_0_is_a_free_port_and_a_taken_one_is_an_error() -> None:
    with http_server.listen("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        assert http_server.url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match=f"--port {port}: Address already in use"):
            http_server.listen("127.0.0.1", port)
    with http_server.listen("0.0.0.0", 0) as listener:
        assert http_server.url_of(listener).startswith("http://127.0.0.1:")


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match=r"--host 192\.0\.2\.1"):
        http_server.listen("192.0.2.1", 0)


def test_the_sockets_folder_is_private_and_goes_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    for base in (tmp_path, deep):
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        with launcher.socket_folder() as private:
            folder = private.path
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            with socket.socket(socket.AF_UNIX) as unix:
                unix.bind(str(folder / "workers"))
        assert not folder.exists()


def test_a_model_that_is_nowhere_is_an_error_that_says_what_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(model_source.ModelSourceError, match=r"--model nowhere: .*hub id"):
        model_source.resolve("nowhere")
    with pytest.raises(model_source.ModelSourceError, match=r"no config\.json"):
        model_source.resolve(str(tmp_path))


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_source.resolve(str(tmp_path)) == tmp_path.resolve()


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(model_source.ModelSourceError) as caught:
        model_source.resolve("owner/name")
    assert "--model owner/name: no local folder, and the hub could not be reached" in str(
        caught.value
    )
    assert "Name or service not known" in str(caught.value)
