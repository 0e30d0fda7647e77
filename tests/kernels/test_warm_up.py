"""After `warm_up` nothing is compiled any more: a compilation in the middle of a step would hold up
the whole process for seconds, heartbeats included."""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the CPU kernels are numba's")

from numba.core import event

from kernels.linear import warm_up
from tests.engine.client import Client
from tests.tiny import save_dsa, save_llama, save_mla


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("save", [save_dsa, save_mla, save_llama])
def test_serving_compiles_nothing(save, dtype, tmp_path):
    import torch

    warm_up((getattr(torch, dtype),))
    with event.install_recorder("numba:compile") as recorder:
        client = Client(save(tmp_path), dtype=dtype, max_total_tokens=64 * 8)
        for i, num_tokens in enumerate((1, 2, 5, 30, 200)):
            prompt = [(i + j) % 190 + 3 for j in range(num_tokens)]
            client.submit(f"{i}", prompt, max_tokens=3, temperature=0.0)
        client.run()
    names = [str(record.data["dispatcher"]) for _, record in recorder.buffer]
    assert not names
