"""Weights in block fp8 and their products in torch, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.block_fp8 import BlockFp8, widen
from kernels.linear import add_linear_, add_swiglu_, linear, norm_linear, swiglu_mlp
from kernels.moe import add_moe_, moe


def by_hand(w: BlockFp8) -> torch.Tensor:
    """Element by element of the grid, in float64."""
    ones = torch.ones(128, 128, dtype=torch.float64)
    matrices = w.codes.reshape(-1, *w.shape[-2:]).double()
    scales = w.scales.reshape(-1, *w.scales.shape[-2:]).double()
    rows, columns = w.shape[-2:]
    wide = [torch.kron(own, ones)[:rows, :columns] for own in scales]
    return (matrices * torch.stack(wide)).view(w.shape)


def draw(*shape: int) -> BlockFp8:
    w = BlockFp8.empty(*shape, device=torch.device("cpu"))
    w.codes.copy_(torch.randn(shape) * 30)
    w.scales.copy_((torch.rand(w.scales.shape) + 0.5) / 30 * shape[-1] ** -0.5)
    return w


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


SHAPES = [(128, 128), (300, 200), (1, 129), (3, 256, 130)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_its_code_times_its_blocks_scale(shape: tuple[int, ...]) -> None:
    w = draw(*shape)
    assert torch.equal(w.to(torch.float64), by_hand(w))
    assert torch.equal(w.to(torch.bfloat16), by_hand(w).float().bfloat16())


def test_blocks_of_another_size_are_widened_too() -> None:
    codes, scales = torch.randn(150, 70).to(torch.float8_e4m3fn), torch.rand(3, 3) + 0.5
    out = torch.full((150, 70), torch.nan, dtype=torch.float64)
    widen(codes, scales, out, (64, 32))
    wide = torch.kron(scales.double(), torch.ones(64, 32, dtype=torch.float64))
    assert torch.equal(out, codes.double() * wide[:150, :70])


@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_weights_are_as_near_as_e4m3_is(shape: tuple[int, ...]) -> None:
    """Three digits after the first; the smallest step is 2**-9 where the largest code is 448."""
    w = torch.randn(shape) * torch.rand(shape) ** 8
    held = BlockFp8.quantised(w)
    step = held.scales.repeat_interleave(128, -2).repeat_interleave(128, -1) * 2.0**-9
    allowed = torch.maximum(w.abs() * 2.0**-4, step[..., : shape[-2], : shape[-1]] / 2)
    assert bool(((held.to(torch.float32) - w).abs() <= allowed * (1 + 1e-5)).all())
    assert bool((BlockFp8.quantised(torch.zeros(shape)).to(torch.float32) == 0).all())


def test_parts_begin_where_blocks_do() -> None:
    w = draw(300, 200)
    assert torch.equal(w[128:256].to(torch.float64), by_hand(w)[128:256])
    assert torch.equal(w[256:].to(torch.float64), by_hand(w)[256:])
    with pytest.raises(ValueError, match="row 100 is not the first one of a block of 128"):
        w[100:]
    experts = draw(4 * 256, 130)
    assert torch.equal(experts.view(4, 256, 130)[2].to(torch.float64), by_hand(experts)[512:768])


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_products(dtype: torch.dtype, limit: float) -> None:
    w, bias = draw(300, 200), torch.randn(300).to(dtype)
    x, h = torch.randn(2, 5, 200).to(dtype), torch.randn(2, 5, 300).to(dtype)
    want = x.double() @ by_hand(w).t()

    def close(got: torch.Tensor, want: torch.Tensor) -> bool:
        return got.dtype == dtype and float((got.double() - want).norm() / want.norm()) < limit

    assert close(linear(x, w), want)
    assert close(linear(x, w, bias), want + bias.double())
    assert close(add_linear_(h.clone(), x, w), h.double() + want)
    norm = torch.rand(200).to(dtype)
    normed, out = norm_linear(x, norm, 1e-6, w)
    assert close(out, normed.double() @ by_hand(w).t())
    with pytest.raises(ValueError, match="differ in their last dimension"):
        linear(x[..., :128], w)


def test_gated_mlp() -> None:
    x, gate_up, down = torch.randn(5, 200), draw(2 * 256, 200), draw(200, 256)
    gate, up = (x.double() @ by_hand(gate_up).t()).chunk(2, dim=1)
    want = (gate * torch.sigmoid(gate) * up) @ by_hand(down).t()
    assert torch.allclose(swiglu_mlp(x, gate_up, down).double(), want, rtol=1e-5, atol=1e-5)
    h, norm = torch.randn(5, 200), torch.rand(200)
    want = h + swiglu_mlp(
        h * norm / (h.square().mean(1, keepdim=True) + 1e-6).sqrt(), gate_up, down
    )
    assert torch.allclose(add_swiglu_(h, norm, 1e-6, gate_up, down), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["both", "gate and up", "down"])
def test_experts(which: str) -> None:
    """Matrices may stay apart in kind: what does not fit the blocks is dequantised on loading."""
    w13, w2 = draw(4, 2 * 128, 200), draw(4, 200, 128)
    exact = by_hand(w13).float(), by_hand(w2).float()
    x, ids = torch.randn(6, 200), torch.randint(0, 4, (6, 2))
    weights, h = torch.rand(6, 2), torch.randn(6, 200)
    own = (
        exact[0] if which == "down" else w13,
        exact[1] if which == "gate and up" else w2,
    )
    want = moe(x, *exact, ids, weights)
    assert torch.allclose(moe(x, *own, ids, weights), want, rtol=1e-4, atol=1e-5)
    shared = draw(2 * 128, 200), draw(200, 128)
    want = h + want + swiglu_mlp(x, *shared)
    assert torch.allclose(add_moe_(h, x, *own, ids, weights, shared), want, rtol=1e-4, atol=1e-5)
