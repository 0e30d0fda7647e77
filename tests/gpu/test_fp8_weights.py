"""On a CUDA device: weights that stay in block fp8, at sizes that are served and in an engine."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import moe
from kernels.block_fp8 import BlockFp8
from kernels.dispatch import keeps_block_fp8
from kernels.linear import add_linear_, linear
from tests.engine.client import Client
from tests.gpu.waits import never_waits
from tests.tiny import save_dsa_fp8

pytestmark = pytest.mark.skipif(
    not keeps_block_fp8(torch.device("cuda")), reason="this card's weights are widened on loading"
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def draw_fp8(*shape: int) -> BlockFp8:
    return BlockFp8.quantised(torch.randn(shape, device="cuda") * shape[-1] ** -0.5)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("columns, depth", [(2240, 7168), (24576, 1536), (7168, 2048), (300, 528)])
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 100, 200, 1000])
def test_linear(rows: int, columns: int, depth: int) -> None:
    w, x, h = draw_fp8(columns, depth), draw(rows, depth), draw(rows, columns)
    want = x.double() @ w.to(torch.float64).t()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got, added = linear(x, w), add_linear_(h.clone(), x, w)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The one rounding of the answer; of many rows, the weights' too.
    limit = 2.5e-3 if rows <= 256 else 4e-3
    assert error(got, want) < limit and error(added, want + h.double()) < limit


@pytest.mark.parametrize("tokens", [1, 7, 33, 200, 3000])
def test_experts(tokens: int) -> None:
    experts, hidden, inner, top_k = 16, 1024, 512, 4
    w13, w2 = draw_fp8(experts, 2 * inner, hidden), draw_fp8(experts, hidden, inner)
    x = draw(tokens, hidden)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    weights = torch.rand(tokens, top_k, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = moe.moe(x, w13, w2, ids, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = w13.to(torch.float64), w2.to(torch.float64)
    assert error(got, moe.moe_reference(x.double(), *wide, ids, weights.double())) < 1e-2


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_an_engine_serves_and_nothing_waits(tmp_path, monkeypatch, cuda_graphs) -> None:
    folder = save_dsa_fp8(tmp_path)
    options = {"max_total_tokens": 64 * 32, "chunked_prefill_size": 300}
    answers = {}
    for quantization in ("auto", "none"):
        client = Client(
            folder, device="cuda", dtype="bfloat16", quantization=quantization,
            cuda_graphs=cuda_graphs, **options,
        )  # fmt: skip
        assert client.engine.model_id.numbers.keeps_fp8 == (quantization == "auto")
        with monkeypatch.context() as patch:
            never_waits(patch, "_forward_all")
            for i, length in enumerate((5, 70, 299, 400)):
                prompt = [3 + (11 * i + 7 * at * at) % 196 for at in range(length)]
                client.submit(f"r{i}", prompt, max_tokens=8, temperature=0.0, logprobs=1)
            client.run()
        assert {end.finish_reason for end in client.ends.values()} == {"length"}
        answers[quantization] = client.logprobs
    # Rounded otherwise, so near; a scale in the wrong place would be seen.
    for rid, logprobs in answers["auto"].items():
        first, other = logprobs[0], answers["none"][rid][0]
        assert math.isclose(first.logprob, other.logprob, abs_tol=0.5), rid
