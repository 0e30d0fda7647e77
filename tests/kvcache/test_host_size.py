"""The size of a host pool: from options, against the memory of machine and cgroup."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.host_size import HostMemory, HostMemoryError, plan_host_pages, read_host_memory

GB = 10**9


def plan(
    *,
    ratio: float = 2.0,
    size_gb: float | None = None,
    available: int = 100 * GB,
    page_bytes: int = 10**6,
    num_sharing: int = 1,
) -> int:
    return plan_host_pages(
        device_pages=1000,
        page_bytes=page_bytes,
        ratio=ratio,
        size_gb=size_gb,
        memory=HostMemory(available),
        num_sharing=num_sharing,
    )


def test_a_ratio_is_of_the_device_pool_and_a_size_wins_over_it() -> None:
    assert plan() == 2000
    assert plan(ratio=0.5) == 500
    assert plan(ratio=7.0, size_gb=1.5) == 1500


def test_too_much_is_refused_with_what_would_fit() -> None:
    with pytest.raises(HostMemoryError) as caught:
        plan(ratio=2.0, available=2 * GB)
    assert str(caught.value) == (
        "--hicache-ratio 2: the host pool would take 2.00 GB on each of 1 ranks of this machine; "
        "available are machine 2.0 GB, no cgroup limit; accepted: 0.001 to 1.8"
    )
    with pytest.raises(HostMemoryError, match=r"--hicache-size 3: .* accepted: 0.001 to 0.9$"):
        plan(size_gb=3, available=2 * GB, num_sharing=2)


@pytest.mark.parametrize("options", [{"ratio": 1e308}, {"size_gb": 1e300}, {"size_gb": 1e308}])
def test_a_size_beyond_all_numbers_is_too_much_like_any_other(options: dict[str, float]) -> None:
    with pytest.raises(HostMemoryError, match=r"1e\+30[08]: the host pool would take .* accepted"):
        plan(**options)


def test_no_page_at_all_is_refused() -> None:
    for options in ({"ratio": 0.0}, {"ratio": -1.0}, {"size_gb": 0.0}, {"size_gb": 0.0005}):
        with pytest.raises(HostMemoryError, match=r"would hold no page of 1000000 bytes; accepted"):
            plan(**options)
    with pytest.raises(HostMemoryError, match="nothing would fit"):
        plan(available=10**5)


@given(
    ratio=st.floats(0.0, 10.0),
    by_size=st.booleans(),
    available=st.integers(10**6, 10**13),
    page_bytes=st.integers(1000, 10**7),
    num_sharing=st.integers(1, 8),
)
def test_what_is_named_as_accepted_is(
    ratio: float, by_size: bool, available: int, page_bytes: int, num_sharing: int
) -> None:
    def ask(value: float) -> int:
        return plan(
            ratio=value,
            size_gb=value if by_size else None,
            available=available,
            page_bytes=page_bytes,
            num_sharing=num_sharing,
        )

    try:
        num_pages = ask(ratio)
    except HostMemoryError as error:
        bounds = re.search(r"accepted: (\S+) to (\S+)$", str(error))
        if bounds is None:
            assert "nothing would fit" in str(error)
        elif float(bounds[1]) <= float(bounds[2]):
            assert ask(float(bounds[1])) >= 1
            assert ask(float(bounds[2])) >= 1
    else:
        assert 0 < num_pages * page_bytes * num_sharing <= 0.9 * available


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    """v2: /a/b has a limit of 5 MB, with 3 MB used of which 1 MB is page cache; /a has none."""
    for path, files in {
        "a/b": {
            "memory.max": "5000000\n",
            "memory.current": "3000000\n",
            "memory.stat": "anon 7\ninactive_file 1000000\n",
        },
        "a": {"memory.max": "max\n", "memory.current": "3500000\n"},
    }.items():
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    (tmp_path / "self").write_text("0::/a/b\n")
    return tmp_path


def test_the_tightest_cgroup_counts(cgroups: Path) -> None:
    assert read_host_memory(cgroups, cgroups / "self").cgroup == 3_000_000
    (cgroups / "a/memory.max").write_text("4000000")
    memory = read_host_memory(cgroups, cgroups / "self")
    assert memory.cgroup == memory.available == 500_000
    (cgroups / "a/memory.max").write_text("3000000")  # lowered below what is used
    assert read_host_memory(cgroups, cgroups / "self").cgroup == 0


def test_version_one(tmp_path: Path) -> None:
    own = tmp_path / "memory" / "pod"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text("7000000\n")
    (own / "memory.usage_in_bytes").write_text("2000000\n")
    (own / "memory.stat").write_text("total_inactive_file 500000\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("2000000\n")
    (tmp_path / "self").write_text("4:cpu:/pod\n3:memory:/pod\n0::/pod\n")
    assert read_host_memory(tmp_path, tmp_path / "self").cgroup == 5_500_000


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    memory = read_host_memory(tmp_path, tmp_path / "self")
    assert memory.cgroup is None
    assert 0 < memory.available <= psutil.virtual_memory().total
