"""What is said where a model or a KV pool does not fit a GPU, and which sizes decodes are recorded
in. The measuring itself needs a device: tests/gpu."""

from __future__ import annotations

import pytest
import torch

from engine.capacity import Capacity, CapacityError
from engine.config import WorkerConfig
from engine.decode_graphs import batch_sizes
from engine.device_memory import check_pool_fits, check_weights_fit

GIB = 1 << 30


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    config = WorkerConfig(model="big", listen_address="")
    device = torch.device("cuda", 1)
    check_weights_fit(config, device, torch.bfloat16, 70 * GIB)
    with pytest.raises(
        CapacityError,
        match=r"--model big: its weights take 71\.00 GiB in bfloat16, and cuda:1 has 70\.00 GiB of "
        r"80\.00 GiB free",
    ):
        check_weights_fit(config, device, torch.bfloat16, 71 * GIB)


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


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 64, 100, 256, 500])
def test_every_batch_has_a_graph_that_is_not_much_larger(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for batch in range(1, most + 1):
        padded = next(size for size in sizes if size >= batch)
        assert padded <= max(8, 2 * batch)
