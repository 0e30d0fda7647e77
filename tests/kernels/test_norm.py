"""Norms against their definition in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.norm import layer_norm, rms_norm


@pytest.mark.parametrize("shape", [(1, 7), (3, 576), (2, 5, 16)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x, weight = 3 * torch.randn(shape), torch.randn(shape[-1])
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert (rms_norm(x, weight, 1e-5) - want).abs().max() < 1e-5


def test_rms_norm_of_zeros_and_of_a_part() -> None:
    assert rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6).tolist() == [[0.0] * 4] * 2
    wide = torch.randn(3, 10)
    assert torch.equal(
        rms_norm(wide[:, 2:6], torch.ones(4), 1e-6),
        rms_norm(wide[:, 2:6].contiguous(), torch.ones(4), 1e-6),
    )


def test_eps_counts_for_small_inputs() -> None:
    x = torch.full((1, 4), 1e-3)
    assert rms_norm(x, torch.ones(4), 1e-6).tolist()[0] == pytest.approx([0.5**0.5] * 4, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_wide(dtype: torch.dtype) -> None:
    """The square of 300 is beyond float16, and 4096 ones cannot be counted in bfloat16."""
    x = torch.full((1, 4096), 300.0, dtype=dtype)
    out = rms_norm(x, torch.ones(4096, dtype=dtype), 1e-6)
    assert out.dtype == dtype
    assert torch.equal(out, torch.ones_like(out))


def test_layer_norm() -> None:
    torch.manual_seed(2)
    x, weight, bias = torch.randn(3, 32) + 5, torch.randn(32), torch.randn(32)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    want = centred / scale * weight.double() + bias.double()
    assert (layer_norm(x, weight, bias, 1e-6) - want).abs().max() < 1e-5
