"""This process's control groups, v1 and v2: which folders limit it, and the numbers in their files.
Knows no option."""

from __future__ import annotations

import math
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders(
    controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP
) -> list[tuple[Path, bool]]:
    """The controller's folders of this process's group and those above it, and whether they are
    v2's. Inside a container its own group may be the only one to be seen, at the root."""
    found: list[tuple[Path, bool]] = []
    for line in text(membership).splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            top, is_v2 = root, True
        elif controller in controllers.split(","):
            top, is_v2 = root / controller, False
        else:
            continue
        own = top / path.strip("/")
        found += [(own, is_v2)]
        found += [(folder, is_v2) for folder in own.parents if folder.is_relative_to(top)]
    return found


def number(path: Path) -> int | None:
    """None: it cannot be read, or says "max", v2's word for no limit."""
    content = text(path).strip()
    return int(content) if content.isdecimal() else None


def text(path: Path) -> str:
    """The file's content, empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def available_cpus(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Processors this process may keep busy: those it may run on, but no more than its quota."""
    count = len(os.sched_getaffinity(0))
    for folder, is_v2 in folders("cpu", root, membership):
        if is_v2:
            quota, _, period = text(folder / "cpu.max").strip().partition(" ")
        else:
            quota = text(folder / "cpu.cfs_quota_us").strip()  # -1: no limit
            period = text(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            count = min(count, max(1, math.ceil(int(quota) / int(period))))
    return count
