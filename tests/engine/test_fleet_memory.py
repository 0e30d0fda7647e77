"""Workers that are started together on one machine: what each takes where nobody says, and what is
said where it is too much in sum."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.capacity import CapacityError, free_host_bytes, plan_capacity
from engine.config import LocalFleet, LocalWorker, WorkerConfig
from engine.fleet_memory import check_fleet_fits
from engine.loading import load_engine
from engine.model.weights import Checkpoint
from kvcache.host_size import HostMemory
from tests.tiny import save_llama

GIB = 1 << 30
PREFILL = LocalWorker("prefill", 0, 2, None, None, ())
DECODE = LocalWorker("decode", 0, 1, None, None, ())
MODEL: Any = SimpleNamespace(context_length=10**6)
PAGE = 64 * 1024  # bytes: a token takes 1024


def fleet_of(*workers: LocalWorker, available: int = 16 * GIB, **options: Any) -> WorkerConfig:
    """The first worker's."""
    return WorkerConfig(
        model="m",
        listen_address="",
        local_fleet=LocalFleet(workers, available),
        **msgspec.structs.asdict(workers[0]),
        **options,
    )


def with_tokens(worker: LocalWorker, gib: float) -> LocalWorker:
    """A worker each rank of which has a KV pool of that size, its dummy page included."""
    return msgspec.structs.replace(worker, max_total_tokens=int(gib * GIB) // 1024 - 64)


def check(config: WorkerConfig, weights: int = GIB, device_bytes: int | None = None) -> None:
    check_fleet_fits(config, MODEL, 1024, weights, 128, device_bytes)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much that the fleet's own limit counts."""
    monkeypatch.setattr("engine.capacity.read_host_memory", lambda: HostMemory(machine=999 * GIB))


def test_pools_that_were_asked_for_are_counted_together_and_each_is_named() -> None:
    fits = fleet_of(with_tokens(PREFILL, 4), with_tokens(DECODE, 5))
    check(fits)
    with pytest.raises(CapacityError) as caught:
        check(fleet_of(with_tokens(PREFILL, 4), with_tokens(DECODE, 6)))
    assert str(caught.value) == (
        "the workers of this machine would take 17.00 GiB of its memory, and 16.00 GiB are "
        "available: prefill 0 2 x 5.00 GiB (weights 1.00 GiB, KV pool 4.00 GiB; 4194240 tokens), "
        "decode 0 1 x 7.00 GiB (weights 1.00 GiB, KV pool 6.00 GiB; 6291392 tokens); a smaller "
        "--max-total-tokens, --prefill-max-total-tokens or --decode-max-total-tokens takes less"
    )


def test_another_workers_size_is_named_by_the_flag_that_it_was_given_by() -> None:
    few = {"max_total_tokens": 64, "role_options": ("max_total_tokens",)}
    with pytest.raises(CapacityError, match=r"^--decode-max-total-tokens 64: "):
        check(fleet_of(PREFILL, msgspec.structs.replace(DECODE, **few)))


def test_host_pools_count_by_size_and_by_ratio() -> None:
    workers = with_tokens(PREFILL, 2), with_tokens(DECODE, 2)
    tier: dict[str, Any] = {"hicache": True}
    check(fleet_of(*workers, **tier, hicache_size=2.0))
    with pytest.raises(CapacityError, match=r"host pool 2\.79 GiB.* a smaller --hicache-size"):
        check(fleet_of(*workers, **tier, hicache_size=3.0))
    check(fleet_of(*workers, **tier, hicache_ratio=1.0))
    with pytest.raises(CapacityError, match=r"host pool 4\.00 GiB"):
        check(fleet_of(*workers, **tier, hicache_ratio=2.0))


def test_on_gpus_only_host_pools_are_in_the_machines_memory() -> None:
    workers = with_tokens(PREFILL, 40), DECODE  # the latter's as large as the card leaves
    check(fleet_of(*workers), 0, 50 * GIB)
    check(fleet_of(*workers, hicache=True, hicache_ratio=0.1), 0, 50 * GIB)
    with pytest.raises(CapacityError, match=r"decode 0 1 x 10\.00 GiB \(host pool 10\.00 GiB;"):
        check(fleet_of(*workers, hicache=True, hicache_ratio=0.2), 0, 50 * GIB)


def test_one_worker_says_it_for_all() -> None:
    config = fleet_of(with_tokens(PREFILL, 40), with_tokens(DECODE, 40))
    check(msgspec.structs.replace(config, role="decode"))
    check(msgspec.structs.replace(config, local_fleet=None))


@given(
    num_decode=st.integers(0, 9),
    cp_size=st.integers(1, 4),
    hicache=st.booleans(),
    ratio=st.floats(0.1, 20),
    weights=st.integers(0, GIB),
)
def test_pools_that_nobody_asked_for_fit_together(
    num_decode: int, cp_size: int, hicache: bool, ratio: float, weights: int
) -> None:
    workers = [msgspec.structs.replace(PREFILL, cp_size=cp_size)]
    workers += [msgspec.structs.replace(DECODE, index=i) for i in range(num_decode)]
    check(fleet_of(*workers, hicache=hicache, hicache_ratio=ratio), weights)


def test_a_worker_with_few_beside_it_takes_a_quarter() -> None:
    for workers in ([PREFILL], [PREFILL, DECODE], [PREFILL, DECODE, DECODE]):
        config = fleet_of(*workers)
        pages = plan_capacity(config, MODEL, free_host_bytes(config, 0), 1024, 128).num_pages
        assert 2 * (pages + 1) * PAGE == 4 * GIB


def test_on_a_cpu_the_checkpoint_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    init = Checkpoint.__init__

    def note(self: Checkpoint, folder: Path | str, *args: Any, **options: Any) -> None:
        opened.append(folder)
        init(self, folder, *args, **options)

    monkeypatch.setattr(Checkpoint, "__init__", note)
    folder = str(save_llama(tmp_path))
    config = fleet_of(with_tokens(PREFILL, 0.01), with_tokens(DECODE, 0.01), device="cpu")
    config = msgspec.structs.replace(config, model=folder, role="colocated", cp_size=1)
    load_engine(config).close()
    assert opened == [folder]


def test_a_fleet_that_does_not_fit_is_refused_before_a_pool_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.KVPool.create", None)
    config = fleet_of(with_tokens(DECODE, 1), DECODE, available=GIB // 2, device="cpu")
    config = msgspec.structs.replace(config, model=str(save_llama(tmp_path)))
    with pytest.raises(CapacityError, match="the workers of this machine would take"):
        load_engine(config)
