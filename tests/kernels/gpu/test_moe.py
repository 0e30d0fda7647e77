"""Experts and gates against their torch forms, the experts in float64."""

from __future__ import annotations

import warnings

import pytest
import torch

from kernels.gpu import groups, moe, route
from kernels.moe import moe_reference
from kernels.route import sigmoid_gate, softmax_gate

DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
if not torch.cuda.is_available():  # Triton's interpreter multiplies no bfloat16
    del DTYPES[torch.bfloat16]
# tokens, experts, choices, hidden, inner
SHAPES = [(1, 4, 2, 32, 16), (11, 3, 2, 48, 24)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights_first", [False, True])
def test_experts(shape, dtype, weights_first, device) -> None:
    tokens, experts, top_k, hidden, inner = shape
    x = torch.randn(tokens, hidden + 8, device=device)[:, :hidden].to(dtype)
    w13 = (torch.randn(experts, 2 * inner, hidden, device=device) * hidden**-0.5).to(dtype)
    w2 = (torch.randn(experts, hidden, inner, device=device) * inner**-0.5).to(dtype)
    ids = torch.randint(0, experts - 1, (tokens, top_k), device=device)  # one expert has no token
    ids[0, 0] = 0  # what a later expert writes past its rows would be seen here
    weights = torch.rand(tokens, top_k, device=device)
    h, shared = (torch.randn(tokens, hidden, device=device).to(dtype) for _ in range(2))
    exact = moe_reference(x.double(), w13.double(), w2.double(), ids, weights.double())
    tile = moe.Tile(16, 64 if weights_first else 16, 16, 4, 2, weights_first)

    got = torch.full_like(h, torch.nan)
    moe.add_moe_(got, x, w13, w2, ids, weights, None, adds=False, tiles=(tile, tile))
    assert float((got.double() - exact).norm() / exact.norm()) < DTYPES[dtype]

    want = exact + h.double() + shared.double()
    moe.add_moe_(h, x, w13, w2, ids, weights, shared)
    assert float((h.double() - want).norm() / want.norm()) < DTYPES[dtype]


def test_groups(device: torch.device) -> None:
    ids = torch.randint(0, 9, (20, 2), device=device)
    order, starts = groups.group(ids, 10)
    want = ids.flatten().sort(stable=True)
    assert order.tolist() == want.indices.tolist()
    assert starts.tolist() == [int((ids < e).sum()) for e in range(11)]


@pytest.mark.parametrize("experts, top_k, groups, kept", [(8, 3, 1, 1), (24, 4, 4, 2)])
@pytest.mark.parametrize("normalise, factor", [(True, 2.5), (False, 1.0)])
def test_gates(experts, top_k, groups, kept, normalise, factor, device) -> None:
    logits = torch.randn(2, experts, device=device)
    bias = torch.randn(experts, device=device)
    options = {"normalise": normalise, "factor": factor}
    for own_bias in (bias, None):
        got = route.gate(logits, own_bias, top_k, groups, kept, normalise, factor)
        args = (top_k, groups, kept)
        if own_bias is None:
            want = softmax_gate(logits.cpu(), *args, **options)
        else:
            want = sigmoid_gate(logits.cpu(), own_bias.cpu(), *args, **options)
        assert torch.equal(got[0].cpu(), want[0])
        assert torch.allclose(got[1].cpu(), want[1], rtol=2e-6, atol=0)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_token_of_nan_goes_to_experts_and_disturbs_no_other(groups, has_bias, device) -> None:
    logits = torch.randn(4, 12, device=device)
    bias = torch.randn(12, device=device) if has_bias else None
    want = route.gate(logits[::3], bias, 3, *groups, True, 2.5)
    logits[1] = torch.nan
    logits[2, 1:] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the interpreter
        ids, weights = route.gate(logits, bias, 3, *groups, True, 2.5)
    assert bool(((ids >= 0) & (ids < 12)).all())
    assert torch.equal(ids[::3], want[0]) and torch.equal(weights[::3], want[1])
