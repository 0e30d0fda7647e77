"""What is said where a model or a KV pool does not fit a GPU, and which sizes decodes are recorded
in. What measuring finds needs a device: tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engine.device_memory
from engine.capacity import Capacity, CapacityError, check_pool_fits
from engine.config import WorkerConfig
from engine.decode_graphs import batch_sizes
from engine.device_memory import (
    StepMemory,
    check_weights_fit,
    free_device_bytes,
    measure_steps,
    steps_ahead,
)
from engine.loading import load_engine, numbers_of
from engine.model.registry import load_model
from tests.tiny import save_llama

GIB = 1 << 30


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    config = WorkerConfig(model="big", listen_address="")
    device = torch.device("cuda", 1)
    numbers = numbers_of(torch.bfloat16, device)
    check_weights_fit(config, device, numbers, 70 * GIB)
    with pytest.raises(
        CapacityError,
        match=r"--model big: its weights take 71\.00 GiB in bfloat16, and cuda:1 has 70\.00 GiB of "
        r"80\.00 GiB free",
    ):
        check_weights_fit(config, device, numbers, 71 * GIB)


def test_a_pool_that_does_not_fit_is_refused_and_the_largest_is_named() -> None:
    def capacity(tokens: int) -> Capacity:
        return Capacity(64, tokens // 64, 1, context_length=4096, chunk_size=512)

    config = WorkerConfig(model="m", listen_address="", max_total_tokens=65536)
    free = 1000 * 65536
    with pytest.raises(
        CapacityError, match=r"--max-total-tokens 65536: .* accepted are up to 65472"
    ):
        check_pool_fits(config, capacity(65536), 1000, free)
    check_pool_fits(config, capacity(65472), 1000, free)
    with pytest.raises(CapacityError, match=r"0\.00 GiB are left for it; nothing would fit$"):
        check_pool_fits(config, capacity(65536), 1000, 3 * 64 * 1000 - 1)
    check_pool_fits(config, capacity(128), 1000, 3 * 64 * 1000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """80 GiB, of which 60 are free beside the weights; a prefill takes 6, decodes take 2."""
    card = SimpleNamespace(free=60 * GIB, steps=StepMemory(6 * GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def measure(*args: object, **sizes: int) -> StepMemory:
        if isinstance(card.steps, Exception):
            raise card.steps
        return card.steps

    monkeypatch.setattr(engine.device_memory, "measure_steps", measure)
    return card


def left_of(fraction: float, **options: Any) -> int:
    config = WorkerConfig(model="m", listen_address="", mem_fraction_static=fraction, **options)
    return free_device_bytes(
        config, SimpleNamespace(), None, torch.bfloat16, torch.device("cuda", 1), 4096, 512
    )  # type: ignore[arg-type]


def test_the_pool_gets_what_the_fraction_and_the_largest_steps_leave(gpu: SimpleNamespace) -> None:
    """60 free, less what is to stay so, less 6, 2 and 1 for libraries."""
    assert left_of(0.999) == pytest.approx((51 - 0.08) * GIB)
    assert left_of(0.5) == 11 * GIB
    assert left_of(0.875, cp_size=2) == (41 - 3) * GIB  # three workspaces of streamed reads
    gpu.free = 20 * GIB  # another process has the rest
    assert left_of(0.875) == GIB


@pytest.mark.parametrize("fraction", [0.01, 0.3625])
def test_a_fraction_that_leaves_nothing_is_refused(gpu: SimpleNamespace, fraction: float) -> None:
    with pytest.raises(
        CapacityError,
        match=rf"--mem-fraction-static {fraction:g}: beside the weights cuda:1 has 60\.00 GiB free"
        r".* the largest steps take 9\.00 GiB: nothing .* A larger fraction \(below 1\), a "
        r"--chunked-prefill-size below 512, a --max-running-requests below 64 or a "
        r"--context-length below 4096 leaves more",
    ):
        left_of(fraction)


def test_steps_that_run_out_of_memory_are_an_error_of_the_options(gpu: SimpleNamespace) -> None:
    gpu.steps = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 1 has a")
    with pytest.raises(
        CapacityError,
        match=r"--model m: cuda:1, which has 60\.00 GiB of 80\.00 GiB free, has no room for the "
        r"largest steps; a --chunked-prefill-size below 512, .* makes them smaller "
        r"\(CUDA out of memory\. Tried to allocate 9 GiB\)",
    ):
        left_of(0.9)


def test_a_pool_that_another_process_was_faster_than_is_an_error_of_the_options(
    gpu: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two on one card: each has measured before the other has taken its pool."""

    def no_room(*args: object, **layout: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB. GPU 0 has a")

    monkeypatch.setattr("engine.loading.KVPool.create", no_room)
    config = WorkerConfig(
        model=str(save_llama(tmp_path)), listen_address="", device="cpu", max_total_tokens=640
    )
    with pytest.raises(
        CapacityError, match=r"60\.00 GiB of .* no room for a KV pool of 10 pages of 64 tokens"
    ):
        load_engine(config)


def test_the_largest_steps_are_those_that_can_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk and the most decodes, both at the end of the longest context, whose tokens are chosen
    in every way that takes memory."""
    peaks = iter([700, 30])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    cpu = torch.device("cpu")
    model = load_model(save_llama(tmp_path), cpu, torch.float32, None)
    steps: list[tuple[int, int]] = []
    forward, sampled, scored = model.forward, [], []

    def spied(token_ids: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        steps.append((len(token_ids), int(positions.max())))
        return forward(token_ids, positions, attention)

    monkeypatch.setattr(model, "forward", spied)
    monkeypatch.setattr(engine.device_memory, "sample", lambda logits, how: sampled.append(how))
    monkeypatch.setattr(engine.device_memory, "score", lambda logits, how: scored.append(how))
    found = measure_steps(
        model,
        model.geometry,
        torch.float32,
        cpu,
        page_size=64,
        context_length=100,
        chunk_size=512,
        max_running=7,
    )
    assert found == StepMemory(695, 25)
    assert steps == [(100, 99), (7, 99)]
    assert [len(part) for part in sampled] == [len(part) for part in scored] == [7, 7]
    for state in (state for part in sampled for state in part):
        assert state.bias is not None and state.output_counts is not None
        assert state.prompt_seen is not None and state.draw().temperature > 0


def test_what_a_start_needs_is_compiled_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest chunk with its draws, and prefills and decodes of many sizes, in one go."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    cpu = torch.device("cpu")
    model = load_model(save_llama(tmp_path), cpu, torch.float32, None)
    forward, ahead, measured = model.forward, [], []
    steps: list[int] = measured

    @contextmanager
    def compiling() -> Iterator[None]:
        nonlocal steps
        steps = ahead
        yield
        steps = measured

    def spied(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        steps.append(len(token_ids))
        return forward(token_ids, *rest)

    monkeypatch.setattr(engine.device_memory, "compiling_ahead", lambda device: compiling())
    monkeypatch.setattr(model, "forward", spied)
    sizes = {"page_size": 64, "context_length": 100, "chunk_size": 32, "max_running": 7}
    measure_steps(model, model.geometry, torch.float32, cpu, **sizes)
    assert ahead == [len(starts) * n for starts, n in steps_ahead(100, 32, 7, False)]
    assert ahead[0] == 32
    assert measured == [32, 7]


def test_steps_of_all_sizes_are_ahead() -> None:
    steps = steps_ahead(100, 32, 7, True)
    assert len(steps) == len(set(steps))
    assert set(steps_ahead(100, 32, 7, False)) < set(steps)
    assert all(0 <= start <= 100 - n for starts, n in steps for start in starts)
    assert {n for _, n in steps} >= {32, 16, 8, 4, 2, 1}
    assert {len(starts) for starts, n in steps if n == 1} == {7, 3, 1}
    assert {starts[0] + n for starts, n in steps} >= {100, 50, 25, 12}


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 64, 100, 256, 500])
def test_every_batch_has_a_graph_that_is_not_much_larger(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for batch in range(1, most + 1):
        padded = next(size for size in sizes if size >= batch)
        assert padded <= max(8, 2 * batch)
