"""The fused forms against float64: norm and product, product and residual, MLP and residual, routed
experts with the shared one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.linear import add_linear_, add_swiglu_, norm_linear
from kernels.moe import add_moe_

DTYPES = [torch.bfloat16, torch.float32]
EPS = 1e-5


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def mlp(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ w_gate_up.double().t()).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ w_down.double().t()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 13, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_norm_linear(dtype, num_rows, bias):
    x, norm = draw(num_rows, 70, seed=1), draw(70, seed=2)
    w, b = draw(37, 70, seed=3, dtype=dtype), draw(37, seed=4) if bias else None
    first, second = norm_linear(x, norm, EPS, w, b)
    want = normed(x, norm)
    assert (first - want).abs().max() < 1e-5
    out = want @ w.double().t() + (0 if b is None else b.double())
    assert (second - out).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 13, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_add_linear(dtype, num_rows, bias):
    h, x = draw(num_rows, 37, seed=1), draw(num_rows, 70, seed=2)
    w, b = draw(37, 70, seed=3, dtype=dtype), draw(37, seed=4) if bias else None
    want = h.double() + x.double() @ w.double().t() + (0 if b is None else b.double())
    out = add_linear_(h, x, w, b)
    assert out is h
    assert (h - want).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 13, 65])
def test_add_swiglu(dtype, num_rows):
    h, norm = draw(num_rows, 40, seed=1), draw(40, seed=2)
    w_gate_up, w_down = draw(46, 40, seed=3, dtype=dtype), draw(40, 23, seed=4, dtype=dtype)
    want = h.double() + mlp(normed(h, norm), w_gate_up, w_down)
    assert add_swiglu_(h, norm, EPS, w_gate_up, w_down) is h
    assert ((h - want).abs() / (1 + want.abs())).max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 9, 33])
@pytest.mark.parametrize("shared", [False, True])
def test_add_moe(dtype, num_rows, shared):
    h, x = draw(num_rows, 40, seed=1), draw(num_rows, 40, seed=2)
    w13, w2 = draw(5, 26, 40, seed=3, dtype=dtype), draw(5, 40, 13, seed=4, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(num_rows)])
    weights = torch.rand(num_rows, 2, generator=generator)
    own = None
    want = h.double()
    if shared:
        own = (draw(18, 40, seed=6, dtype=dtype), draw(40, 9, seed=7, dtype=dtype))
        want = want + mlp(x.double(), *own)
    for row in range(num_rows):  # expert 4 has no token
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            want[row] += weight * mlp(x[row].double(), w13[expert], w2[expert])
    assert add_moe_(h, x, w13, w2, ids, weights, own) is h
    assert ((h - want).abs() / (1 + want.abs())).max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype):
    x, norm, w = draw(20, 64, seed=1), draw(64, seed=2), draw(30, 64, seed=3, dtype=dtype)
    together = norm_linear(x, norm, EPS, w)[1]
    for row in range(20):
        assert torch.equal(norm_linear(x[row : row + 1], norm, EPS, w)[1][0], together[row])
