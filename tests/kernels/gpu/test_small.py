"""Rotary embedding, rows into the cache and the MLP's gate against their torch forms."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.gpu import rope, store, swiglu
from kernels.rope import rope_leading
from kernels.store_kv import store_rows

DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Triton's interpreter truncates where the device rounds to bfloat16.
ROUNDED = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 12, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(interleaved, rotary, dtype, device) -> None:
    wide = torch.randn(5, 9, 24, device=device).to(dtype)
    angles = torch.randn(5, rotary // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    for x in (wide[:, 2:5, 4:20], wide[:, 3, :16]):
        got = rope.rope_leading(x, cos, sin, interleaved, 0.3)
        want = rope_leading(x.cpu().float(), cos.cpu(), sin.cpu(), interleaved, 0.3)
        assert got.dtype == dtype and got.is_contiguous()
        assert float((got.cpu().float() - want).norm() / want.norm()) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("chosen", [None, [3, 0, 5]])
def test_store(dtype, chosen, device) -> None:
    tokens = None if chosen is None else torch.tensor(chosen, device=device)
    num = 6 if chosen is None else len(chosen)
    rows = torch.randperm(20, device=device)[:num]
    latent, wide = torch.randn(6, 40, device=device), torch.randn(6, 5, 8, device=device)
    for parts, shape in (
        ((latent[:, :33], latent[:, 35:]), (20, 38)),
        ((latent,), (20, 40)),
        ((wide[:, 1:4],), (20, 3, 8)),
        ((wide[..., :5],), (20, 5, 5)),
    ):
        cache = torch.full(shape, torch.nan, device=device, dtype=dtype)
        want = cache.clone()
        store.store_rows(cache, rows, tokens, *parts)
        store_rows(want_cpu := want.cpu(), rows.cpu(), None if tokens is None else tokens.cpu(),
                   *(part.cpu() for part in parts))  # fmt: skip
        assert torch.equal(cache.cpu().isnan(), want_cpu.isnan())
        assert torch.equal(cache.cpu().nan_to_num(99), want_cpu.nan_to_num(99))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype, device) -> None:
    gate_up = torch.randn(3, 74, device=device).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    want = functional.silu(gate) * up
    got = swiglu.silu_mul(gate_up)
    assert got.dtype == dtype
    assert float((got.double() - want).norm() / want.norm()) < DTYPES[dtype]
