"""How large the KV pool becomes where no option says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.capacity import free_host_bytes, plan_capacity
from engine.config import WorkerConfig
from kvcache.host_size import HostMemory

GB = 10**9


@pytest.mark.parametrize("cp_size", [1, 2])
def test_on_a_cpu_the_pool_fits_what_the_container_may_use(
    monkeypatch: pytest.MonkeyPatch, cp_size: int
) -> None:
    model: Any = SimpleNamespace(context_length=10**6)
    config = WorkerConfig(model="m", listen_address="", cp_size=cp_size)

    def pool_bytes(memory: HostMemory) -> int:
        monkeypatch.setattr("engine.capacity.read_host_memory", lambda: memory)
        capacity = plan_capacity(config, model, free_host_bytes(config), 1000, 512)
        return capacity.physical_tokens * 1000

    assert pool_bytes(HostMemory(machine=64 * GB)) > 8 * GB / cp_size
    limited = pool_bytes(HostMemory(machine=64 * GB, cgroup=4 * GB))
    assert GB / 2 < limited * cp_size <= GB
    assert pool_bytes(HostMemory(machine=4 * GB, cgroup=64 * GB)) == limited
