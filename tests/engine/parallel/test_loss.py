"""A group that loses a rank ends, says which and why, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest

from engine.channel import Channel
from engine.config import WorkerConfig
from engine.messages import Drain, Hello, Outputs, Submit
from engine.parallel.group import GROUP_FAILED
from engine.types import Request, SamplingParams
from tests.tiny import save_dsa

WAIT_S = 120  # for a busy machine; nothing is measured by it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_dsa(tmp_path_factory.mktemp("model"))


class Group:
    """A worker of two ranks over its real socket."""

    def __init__(self, folder, tmp_path):
        self.address = f"ipc://{tmp_path}/w"
        self.channel = Channel("frontend")
        self.channel.dial(self.address)
        config = WorkerConfig(
            model=str(folder),
            listen_address=self.address,
            dtype="float32",
            device="cpu",
            cp_size=2,
            max_total_tokens=64 * 64,
            chunked_prefill_size=16,
        )
        command = [sys.executable, "-m", "engine", msgspec.json.encode(config).decode()]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        is_ready = False
        while not is_ready:
            assert self.process.poll() is None, self.process.stderr.read()
            is_ready = any(isinstance(m, Hello) for _, m in self.channel.receive(0.2))
        self.rank = next(
            p
            for p in psutil.Process(self.process.pid).children()
            if "rank" in " ".join(p.cmdline())
        )

    def submit(self, num_tokens: int, max_tokens: int) -> None:
        request = Request(
            rid="r",
            token_ids=[i % 190 + 3 for i in range(num_tokens)],
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
        self.channel.send(self.address, Submit(request))

    def wait_for_output(self):
        while True:
            for _, message in self.channel.receive(0.2):
                if isinstance(message, Outputs):
                    return message.outs
            assert self.process.poll() is None

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, said

    def close(self):
        for process in (self.process, self.rank):
            try:
                process.kill()
                process.wait()
            except psutil.NoSuchProcess:
                pass
        self.process.stderr.close()
        self.channel.close()


@pytest.fixture
def group(folder, tmp_path):
    group = Group(folder, tmp_path)
    yield group
    group.close()


def test_a_killed_rank_ends_its_group_in_the_middle_of_a_prefill(group):
    group.submit(2000, 2000)
    group.rank.send_signal(signal.SIGKILL)
    code, said = group.ended()
    assert code == GROUP_FAILED
    assert f"rank 1 (pid {group.rank.pid}) was killed by signal 9" in said
    assert not group.rank.is_running()


def test_a_silent_rank_ends_its_group(group):
    group.submit(20, 3000)
    group.wait_for_output()
    group.rank.send_signal(signal.SIGSTOP)
    code, said = group.ended()
    assert code == GROUP_FAILED
    assert "rank 1 has said nothing for 6 s" in said
    assert not psutil.pid_exists(group.rank.pid)


def test_ranks_listen_on_loopback_only_and_end_with_a_killed_leader(group):
    for process in (psutil.Process(group.process.pid), group.rank):
        listening = {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"}
        assert listening <= {"127.0.0.1", "::1"}
    group.process.kill()
    group.process.wait()
    group.rank.wait(timeout=WAIT_S)


def test_a_drained_group_ends_with_exit_code_0_and_no_rank_left(group):
    group.submit(20, 3)
    group.wait_for_output()
    group.channel.send(group.address, Drain())
    code, _ = group.ended()
    assert code == 0
    assert not group.rank.is_running()


def test_sigterm_to_every_process_of_the_group_drains_it(group):
    group.submit(20, 3)
    group.wait_for_output()
    for pid in (group.rank.pid, group.process.pid):
        os.kill(pid, signal.SIGTERM)
    code, _ = group.ended()
    assert code == 0
    assert not group.rank.is_running()
