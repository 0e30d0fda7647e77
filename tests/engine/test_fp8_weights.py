"""A checkpoint in block fp8 whose weights stay so: what GPUs do, here in the torch forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine import loading
from engine.model.deepseek import DeepseekModel
from engine.model.layers import Mlp
from engine.model.moe import Moe
from engine.model.registry import load_model
from kernels.block_fp8 import BlockFp8
from tests.engine.client import Client
from tests.engine.model.driver import Driver
from tests.tiny import save_dsa_fp8

PROMPTS = [[3 + (7 * i * i + n) % 196 for i in range(n)] for n in (5, 40, 130)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dsa_fp8(tmp_path_factory.mktemp("fp8"))


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "keeps_block_fp8", lambda device: True)


def test_what_is_stored_in_fp8_and_multiplied_stays_so(folder: Path) -> None:
    model = load_model(folder, "cpu", torch.bfloat16, keeps_fp8=True)
    assert isinstance(model, DeepseekModel)
    dense, sparse = model.layers
    attention, mlp, moe = dense.self_attn, dense.mlp, sparse.mlp
    assert isinstance(mlp, Mlp) and isinstance(moe, Moe) and attention.indexer is not None
    assert moe.shared_experts is not None
    kept = [
        attention.input_proj, attention.q_b_proj, attention.o_proj, attention.indexer.wq_b,
        mlp.down_proj, moe.w13, moe.w2, moe.shared_experts.gate_up_proj,
    ]  # fmt: skip
    assert [isinstance(w, BlockFp8) for w in kept] == [True] * 6 + [False] + [True]
    # Its gate ends within a block; one expert's rows do, in w2.
    assert isinstance(mlp.gate_up_proj, torch.Tensor) and isinstance(attention.w_uk, torch.Tensor)


def test_logits_are_those_of_the_dequantised_weights(folder: Path) -> None:
    kept, widened = (
        Driver(load_model(folder, "cpu", torch.float32, keeps_fp8=keeps)) for keeps in (True, False)
    )
    requests = [[driver.start(prompt) for prompt in PROMPTS] for driver in (kept, widened)]
    for got, want in zip(kept.prefill(requests[0]), widened.prefill(requests[1]), strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def serve(folder: Path, **options: str) -> Client:
    client = Client(folder, dtype="bfloat16", max_total_tokens=64 * 16, **options)
    for i, prompt in enumerate(PROMPTS):
        client.submit(f"r{i}", prompt, temperature=0.0, max_tokens=4)
    client.run()
    return client


def test_workers_of_the_two_kinds_are_told_apart(folder: Path, like_a_gpu: None) -> None:
    """One that keeps fp8 adds other digits than one that does not."""
    kept, widened = serve(folder), serve(folder, quantization="none")
    numbers = kept.engine.model_id.numbers
    assert (numbers.weights, numbers.keeps_fp8) == ("bfloat16", True)
    assert widened.engine.model_id.numbers == replace(numbers, keeps_fp8=False)
    assert {end.finish_reason for end in kept.ends.values()} == {"length"}
    assert [len(tokens) for tokens in kept.tokens.values()] == [4, 4, 4]


def test_float32_is_not_left_in_fp8(folder: Path, like_a_gpu: None) -> None:
    client = Client(folder, max_total_tokens=64 * 16)
    assert str(client.engine.model_id.numbers) == "float32"


def test_a_cpu_dequantises(folder: Path) -> None:
    numbers = serve(folder).engine.model_id.numbers
    assert (numbers.weights, numbers.keeps_fp8, numbers.kv) == ("bfloat16", False, "float32")
