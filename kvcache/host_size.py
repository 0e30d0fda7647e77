"""How many pages a rank's host pool gets, checked against the memory that there is. Knows the two
options that say it, no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from kvcache import cgroup

_SHARE = 0.9  # of the available memory; the rest is for everything else
_GB = 10**9


class HostMemoryError(ValueError):
    """The host pool that was asked for does not fit this machine, or is no pool at all."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes that could be had now."""

    machine: int
    cgroup: int | None = None  # None: no limit

    @property
    def available(self) -> int:
        return self.machine if self.cgroup is None else min(self.machine, self.cgroup)

    def __str__(self) -> str:
        limit = "no cgroup limit" if self.cgroup is None else f"cgroup {self.cgroup / _GB:.1f} GB"
        return f"machine {self.machine / _GB:.1f} GB, {limit}"


def read_host_memory(
    cgroups: Path = cgroup.ROOT, membership: Path = cgroup.MEMBERSHIP
) -> HostMemory:
    """What this machine has available, and what this process's cgroup and those above it leave.
    cgroup v1 and v2; what cannot be read limits nothing."""
    left = [
        limit - used
        for folder, is_v2 in cgroup.folders("memory", cgroups, membership)
        if (limit := cgroup.number(folder / (names := _V2 if is_v2 else _V1).limit)) is not None
        and (used := _used(folder, names)) is not None
    ]
    machine = psutil.virtual_memory().available
    # Without a limit, v1 says a number near 2**63.
    tightest = min((max(0, n) for n in left if n < psutil.virtual_memory().total), default=None)
    return HostMemory(machine, tightest)


def plan_host_pages(
    *,
    device_pages: int,  # physical, of a rank
    page_bytes: int,
    ratio: float,
    size_gb: float | None,
    memory: HostMemory,
    num_sharing: int = 1,
) -> int:
    """Physical pages of each rank's host pool: --hicache-size GB (10**9 bytes) where it is given,
    else --hicache-ratio times the device pool's. `num_sharing` ranks share this machine.

    Raises HostMemoryError, with the option, its value and what would fit, where that is less than
    a page or more than nine tenths of what is available.
    """
    if size_gb is not None:
        option, per_page = f"--hicache-size {size_gb:g}", page_bytes / _GB
        asked = size_gb * _GB / page_bytes
    else:
        option, per_page = f"--hicache-ratio {ratio:g}", 1 / device_pages
        asked = ratio * device_pages
    num_pages = int(min(asked, 1e18))  # a float may be infinite; as a count this is no less wrong
    num_fitting = int(memory.available * _SHARE / num_sharing) // page_bytes
    most = _floor(num_fitting * per_page)
    fitting = f"accepted: {_ceil(per_page):g} to {most:g}" if num_fitting else "nothing would fit"
    if num_pages < 1:
        raise HostMemoryError(
            f"{option}: the host pool would hold no page of {page_bytes} bytes; {fitting}"
        )
    if num_pages > num_fitting:
        raise HostMemoryError(
            f"{option}: the host pool would take {num_pages * page_bytes / _GB:.2f} GB on each of "
            f"{num_sharing} ranks of this machine; available are {memory}; {fitting}"
        )
    return num_pages


@dataclass(frozen=True, slots=True)
class _Names:
    limit: str
    used: str
    reclaimable: str  # in memory.stat


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def _used(folder: Path, names: _Names) -> int | None:
    used = cgroup.number(folder / names.used)
    if used is None:
        return None
    for line in cgroup.text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == names.reclaimable:
            used -= int(value)
    return used


def _floor(value: float) -> float:
    """Down to three significant digits, so that what is printed can be used."""
    digits = float(f"{value:.2e}")
    return digits if digits <= value else digits - 10.0 ** (int(f"{value:.2e}".split("e")[1]) - 2)


def _ceil(value: float) -> float:
    """Up to three significant digits."""
    digits = float(f"{value:.2e}")
    return digits if digits >= value else digits + 10.0 ** (int(f"{value:.2e}".split("e")[1]) - 2)
