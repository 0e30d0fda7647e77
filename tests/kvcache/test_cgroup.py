"""A process's control groups, from files like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcache import cgroup


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(path, text): a file under the root; the process may run on eight processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    return write


def cpus(root: Path) -> int:
    return cgroup.available_cpus(root, root / "membership")


def test_no_group_and_no_quota_leave_what_the_scheduler_allows(write, tmp_path):
    assert cpus(tmp_path) == 8
    write("membership", "0::/app")
    write("app/cpu.max", "max 100000")
    assert cpus(tmp_path) == 8


@pytest.mark.parametrize(
    ("quota", "expected"), [("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1)]
)
def test_a_quota_counts_whole_processors_rounded_up(write, tmp_path, quota, expected):
    write("membership", "0::/app")
    write("app/cpu.max", quota)
    assert cpus(tmp_path) == expected


def test_the_tightest_group_above_counts(write, tmp_path):
    write("membership", "0::/pod/container")
    write("pod/container/cpu.max", "max 100000")
    write("pod/cpu.max", "300000 100000")
    assert cpus(tmp_path) == 3


def test_v1_with_its_own_hierarchy_and_a_group_that_is_seen_at_the_root(write, tmp_path):
    write("membership", "4:memory:/docker/7\n2:cpu,cpuacct:/docker/7\n0::/")
    write("cpu/cpu.cfs_period_us", "100000")
    write("cpu/cpu.cfs_quota_us", "-1")
    assert cpus(tmp_path) == 8
    write("cpu/cpu.cfs_quota_us", "400000")
    assert cpus(tmp_path) == 4
