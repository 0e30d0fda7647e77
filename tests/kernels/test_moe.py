import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.linear import fast_bf16_available
from kernels.moe import moe

WEIGHTS = [torch.bfloat16, torch.float16, torch.float32]
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def layer(
    seed: int, t: int, h: int, i: int, e: int, k: int, dtype: torch.dtype = torch.bfloat16
) -> Layer:
    g = torch.Generator().manual_seed(seed)
    w13 = (torch.randn(e, 2 * i, h, generator=g) * h**-0.5).to(dtype)
    w2 = (torch.randn(e, h, i, generator=g) * i**-0.5).to(dtype)
    ids = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(t)])
    return torch.randn(t, h, generator=g), w13, w2, ids, torch.rand(t, k, generator=g)


def exact(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Token by token, choice by choice, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for choice in range(ids.shape[1]):
            expert = ids[token, choice]
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            y = w2[expert].double() @ (gate * torch.sigmoid(gate) * up)
            out[token] += weights[token, choice].double() * y
    return out


def assert_layer(args: Layer) -> None:
    got = moe(*args)
    assert got.dtype == args[0].dtype
    assert torch.allclose(got.double(), exact(*args), rtol=2e-5, atol=2e-5)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def poisoned(*shape, **options):  # type: ignore[no-untyped-def]
        out = plain(*shape, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("t", [1, 2, 3, 5, 33])
def test_default_model(dtype: torch.dtype, t: int, poison: None) -> None:
    assert_layer(layer(t, t, 576, 192, 8, 4, dtype))


@given(
    t=st.integers(1, 12), h=st.integers(1, 70), i=st.integers(1, 40), e=st.integers(1, 9),
    k=st.integers(1, 9), seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_shape(t: int, h: int, i: int, e: int, k: int, seed: int) -> None:
    assert_layer(layer(seed, t, h, i, e, min(k, e)))


def test_experts_without_tokens_are_not_read(poison: None) -> None:
    x, w13, w2, _, weights = layer(1, 6, 40, 12, 16, 2)
    ids = torch.tensor([[3, 15]]).expand(6, 2)
    for expert in set(range(16)) - {3, 15}:
        w13[expert], w2[expert] = float("nan"), float("nan")
    assert_layer((x, w13, w2, ids, weights))


def test_one_expert_takes_all_and_may_be_named_twice(poison: None) -> None:
    x, w13, w2, _, weights = layer(2, 50, 40, 12, 4, 2)
    assert_layer((x, w13, w2, torch.ones(50, 2, dtype=torch.int64), weights))


def test_strided_inputs() -> None:
    x, w13, w2, ids, weights = layer(3, 7, 32, 8, 6, 3)
    wide = torch.zeros(7, 64)
    wide[:, ::2] = x
    args = (wide[:, ::2], w13.mT.contiguous().mT, w2.mT.contiguous().mT, ids.T.contiguous().T)
    assert_layer((*args, weights.T.contiguous().T))


def test_a_token_does_not_depend_on_its_batch() -> None:
    if not fast_bf16_available():
        return  # torch's products promise no such thing
    x, w13, w2, ids, weights = layer(4, 90, 200, 60, 8, 4)
    whole = moe(x, w13, w2, ids, weights)
    for rows in (slice(0, 1), slice(8, 10), slice(30, 70)):
        assert torch.equal(moe(x[rows], w13, w2, ids[rows], weights[rows]), whole[rows])


def test_no_tokens_and_no_choices() -> None:
    x, w13, w2, ids, weights = layer(5, 3, 16, 4, 2, 1)
    assert moe(x[:0], w13, w2, ids[:0], weights[:0]).shape == (0, 16)
    assert torch.equal(moe(x, w13, w2, ids[:, :0], weights[:, :0]), torch.zeros(3, 16))


def test_torch_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "numba_kernels", lambda: None)
    assert_layer(layer(6, 9, 24, 10, 5, 2))


def test_misfits_are_named() -> None:
    x, w13, w2, ids, weights = layer(7, 3, 16, 4, 2, 1)
    with pytest.raises(ValueError, match=r"w13 \[E, 2I, H\].*\[2, 7, 16\]"):
        moe(x, w13[:, :7], w2, ids, weights)
    with pytest.raises(ValueError, match=r"topk_weights \[2, 1\] must both be \[3, k\]"):
        moe(x, w13, w2, ids, weights[:2])
    with pytest.raises(ValueError, match="topk_ids"):
        moe(x, w13, w2, torch.full_like(ids, 2), weights)
    with pytest.raises(ValueError, match="topk_ids"):
        moe(x, w13, w2, torch.full_like(ids, -1), weights)
