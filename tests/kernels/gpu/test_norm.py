"""Norms against their definition in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import norm

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # largest relative error


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (3 * torch.randn(shape, device=device) + 1).to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("shape", [(1, 7), (3, 576), (5, 4, 16), (70, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = draw(shape, dtype, device), draw(shape[-1:], dtype, device)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = norm.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype and error(got, want) < DTYPES[dtype]


@pytest.mark.parametrize("shape", [(1, 7), (37, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = draw(shape, dtype, device)
    weight, bias = draw(shape[-1:], dtype, device), draw(shape[-1:], dtype, device)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    want = scaled * weight.double() + bias.double()
    got = norm.layer_norm(x, weight, bias, 1e-6)
    assert got.dtype == dtype and error(got, want) < DTYPES[dtype]


def test_parts_of_wider_rows_are_read_in_place(device: torch.device) -> None:
    """The heads of fused projections: strided in the first two dimensions."""
    wide = draw((6, 9, 24), torch.float32, device)
    weight = draw((16,), torch.float32, device)
    part = wide[:, 2:7, 4:20]
    assert torch.equal(norm.rms_norm(part, weight, 1e-6), norm.rms_norm(part.clone(), weight, 1e-6))
    row = wide[:, 0, :16]
    assert torch.equal(norm.rms_norm(row, weight, 1e-6), norm.rms_norm(row.clone(), weight, 1e-6))


def test_no_rows(device: torch.device) -> None:
    empty = torch.empty(0, 8, device=device)
    assert norm.rms_norm(empty, torch.ones(8, device=device), 1e-6).shape == (0, 8)
