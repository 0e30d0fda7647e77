"""How large the KV pool becomes where no option says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.capacity import CapacityError, free_host_bytes, plan_capacity
from engine.config import WorkerConfig
from engine.loading import load_engine
from kvcache.host_size import HostMemory
from tests.tiny import save_llama

GB = 10**9


@pytest.mark.parametrize("cp_size", [1, 2])
def test_on_a_cpu_the_pool_fits_what_the_container_may_use(
    monkeypatch: pytest.MonkeyPatch, cp_size: int
) -> None:
    model: Any = SimpleNamespace(context_length=10**6)
    config = WorkerConfig(model="m", listen_address="", cp_size=cp_size)

    def pool_bytes(memory: HostMemory) -> int:
        monkeypatch.setattr("engine.capacity.read_host_memory", lambda: memory)
        capacity = plan_capacity(config, model, free_host_bytes(config, 0), 1000, 512)
        return capacity.physical_tokens * 1000

    assert pool_bytes(HostMemory(machine=64 * GB)) > 8 * GB / cp_size
    limited = pool_bytes(HostMemory(machine=64 * GB, cgroup=4 * GB))
    assert GB / 2 < limited * cp_size <= GB
    assert pool_bytes(HostMemory(machine=4 * GB, cgroup=64 * GB)) == limited


@pytest.mark.parametrize(
    ("tokens", "free", "said"),
    [
        (127, GB, "--max-total-tokens 127: .* 1 pages of 64 tokens; accepted are 128 or more"),
        (None, 191_999, "--model m: 0.00 GiB are left for the KV pool, which needs 0.00 GiB"),
        (None, 0, "3 pages of 64 tokens, 1000 bytes each"),
    ],
)
def test_a_pool_of_less_than_two_pages_is_refused(tokens: int | None, free: int, said: str) -> None:
    model: Any = SimpleNamespace(context_length=10**6)
    config = WorkerConfig(model="m", listen_address="", max_total_tokens=tokens)
    with pytest.raises(CapacityError, match=said):
        plan_capacity(config, model, free, 1000, 512)
    enough = WorkerConfig(model="m", listen_address="", max_total_tokens=tokens and 128)
    assert plan_capacity(enough, model, 192_000, 1000, 512).num_pages == 2


def test_a_pool_beyond_this_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(machine=64 * GB, cgroup=GB // 10)
    monkeypatch.setattr("engine.capacity.read_host_memory", lambda: memory)
    options = {"model": str(save_llama(tmp_path)), "listen_address": "", "device": "cpu"}
    with pytest.raises(CapacityError, match=r"--max-total-tokens 10000000000000: .* up to 195200"):
        load_engine(WorkerConfig(max_total_tokens=10**13, **options))


@pytest.mark.parametrize("device", ["nonsense", "cuda:x", "cuda:-1", "mps", "", "cpu:3", "cuda:9 "])
def test_a_device_that_is_none_is_refused(device: str, tmp_path: Path) -> None:
    config = WorkerConfig(model=str(save_llama(tmp_path)), listen_address="", device=device)
    with pytest.raises(ValueError, match=rf"--device {device}: accepted are auto, cpu, cuda and"):
        load_engine(config)
