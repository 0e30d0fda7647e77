import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.linear import fast_bf16_available, linear, swiglu_mlp

WEIGHTS = [torch.bfloat16, torch.float16, torch.float32]
FP32_ROUNDING = 2.0**-24


def random(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.double() @ w.double().T


def bound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Every fp32 summation order stays below K roundings of the sum of the products' sizes."""
    return (x.shape[-1] + 1) * FP32_ROUNDING * (x.double().abs() @ w.double().abs().T)


def assert_product(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    assert got.dtype == x.dtype
    assert got.shape == (*x.shape[:-1], w.shape[0])
    assert bool(((got.double() - exact(x, w)).abs() <= bound(x, w)).all())


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so a number that is never written, or read before, shows."""
    plain = torch.empty

    def poisoned(*shape, **options):  # type: ignore[no-untyped-def]
        out = plain(*shape, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "numba_kernels", lambda: None)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("k", [1, 7, 16, 576, 1030])
@pytest.mark.parametrize("n", [1, 3, 5, 8, 66])
def test_matches_float64(dtype: torch.dtype, k: int, n: int, poison: None) -> None:
    w = random(1, n, k).to(dtype)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 100):
        x = random(m, m, k)
        assert_product(linear(x, w), x, w)


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_many_rows_and_long_rows(dtype: torch.dtype, poison: None) -> None:
    x, w = random(2, 130, 3000), random(3, 10, 3000).to(dtype)
    assert_product(linear(x, w), x, w)


@pytest.mark.parametrize("dtype", WEIGHTS)
@given(
    m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 2100), seed=st.integers(0, 2**32)
)
@settings(max_examples=25, deadline=None)
def test_any_shape(dtype: torch.dtype, m: int, n: int, k: int, seed: int) -> None:
    x, w = random(seed, m, k), random(seed + 1, n, k).to(dtype)
    assert_product(linear(x, w), x, w)


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    if not fast_bf16_available():
        return  # torch's products promise no such thing
    x, w = random(4, 120, 1100), random(5, 70, 1100).to(dtype)
    whole = linear(x, w)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 10), slice(50, 54), slice(20, 119)):
        assert torch.equal(linear(x[rows].clone(), w), whole[rows])


def test_strided_inputs() -> None:
    x, w = random(6, 5, 4, 40), random(7, 12, 64).bfloat16()
    columns = x[..., 8:24]
    assert_product(linear(columns, w[:, :16]), columns, w[:, :16])
    transposed = random(8, 16, 9).T
    assert_product(linear(transposed, w[:, :16]), transposed, w[:, :16])
    assert_product(linear(transposed, w[::2, 1:17]), transposed, w[::2, 1:17])
    w_t = random(9, 16, 6).bfloat16().T
    assert_product(linear(columns, w_t), columns, w_t)


def test_bias_and_leading_dimensions() -> None:
    x, w, bias = random(1, 2, 3, 24), random(2, 5, 24).bfloat16(), random(3, 5).bfloat16()
    expected = exact(x, w) + bias.double()
    assert torch.allclose(linear(x, w, bias).double(), expected, rtol=1e-5, atol=1e-5)
    assert_product(linear(x[0, 0], w), x[0, 0], w)


def test_low_precision_activations_are_rounded_once() -> None:
    x, w = random(1, 6, 200).bfloat16(), random(2, 9, 200).bfloat16()
    got = linear(x, w)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), exact(x, w), rtol=2.0**-8, atol=1e-4)


def test_nothing_to_do() -> None:
    w = random(1, 4, 8).bfloat16()
    assert linear(torch.empty(0, 8), w).shape == (0, 4)
    assert linear(random(1, 3, 8), w[:0]).shape == (3, 0)
    assert torch.equal(linear(torch.empty(3, 0), w[:, :0]), torch.zeros(3, 4))


def test_non_finite_values_pass_through() -> None:
    x, w = torch.ones(2, 16), torch.ones(4, 16).bfloat16()
    x[0, 3], w[2, 5] = float("inf"), float("nan")
    got = linear(x, w)
    assert bool(got[0, [0, 1, 3]].isposinf().all())
    assert bool(got[:, 2].isnan().all())
    assert torch.equal(got[1, [0, 1, 3]], torch.full((3,), 16.0))


def test_every_bf16_and_fp16_value_is_widened_exactly() -> None:
    bits = torch.from_numpy(np.arange(-(2**15), 2**15, dtype=np.int16))
    for dtype in (torch.bfloat16, torch.float16):
        w = bits.view(dtype)[:, None]
        w = w[w[:, 0].isfinite()]
        assert torch.equal(linear(torch.ones(1, 1), w)[0], w[:, 0].float())


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[2, 8\].*\[4, 9\]"):
        linear(torch.zeros(2, 8), torch.zeros(4, 9))
    with pytest.raises(ValueError, match=r"w_gate_up \[2I, H\].*\[6, 8\].*\[8, 4\]"):
        swiglu_mlp(torch.zeros(2, 8), torch.zeros(6, 8), torch.zeros(8, 4))


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_torch_fallback(dtype: torch.dtype, without_numba: None) -> None:
    assert not fast_bf16_available()
    x, w, bias = random(1, 5, 30), random(2, 4100, 30).to(dtype), random(3, 4100)
    assert_product(linear(x, w), x, w)
    expected = exact(x, w) + bias.double()
    assert torch.allclose(linear(x, w, bias).double(), expected, rtol=1e-5, atol=1e-5)


def exact_swiglu(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ w13.double().T).chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up) @ w2.double().T


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (7, 5), (64, 30), (576, 192)])
def test_swiglu_matches_float64(dtype: torch.dtype, hidden: int, inner: int, poison: None) -> None:
    w13 = (random(1, 2 * inner, hidden) * hidden**-0.5).to(dtype)
    w2 = (random(2, hidden, inner) * inner**-0.5).to(dtype)
    for m in (1, 2, 3, 5, 40):
        x = random(m, m, hidden)
        got = swiglu_mlp(x, w13, w2)
        assert torch.allclose(got.double(), exact_swiglu(x, w13, w2), rtol=1e-5, atol=1e-5)


def test_swiglu_without_numba(without_numba: None) -> None:
    x, w13, w2 = random(1, 2, 3, 16), random(2, 20, 16).bfloat16(), random(3, 16, 10).bfloat16()
    expected = exact_swiglu(x, w13, w2)
    assert torch.allclose(swiglu_mlp(x, w13, w2).double(), expected, rtol=1e-4, atol=1e-4)


def test_silu_over_its_whole_range() -> None:
    """With H = I = 1, weights of 1 and x as the gate's input, the result is silu(x) * x."""
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, 1e-30, -1e-30])])[:, None]
    one = torch.ones(2, 1)
    got = swiglu_mlp(x, one, one[:1])
    expected = x.double() * torch.sigmoid(x.double()) * x.double()
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-30)
