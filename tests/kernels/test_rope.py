"""apply_rope: a rotation, in two orders of the same pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rope import apply_rope

heads = st.integers(1, 3)
pairs = st.integers(1, 9)
seeds = st.integers(0, 2**31)


def angles(positions: torch.Tensor, num_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 100.0 ** -(torch.arange(num_pairs) / num_pairs)
    turned = positions.float()[:, None] * frequencies
    return turned.cos(), turned.sin()


@given(seeds, st.integers(1, 5), heads, pairs, st.booleans())
@settings(deadline=None, max_examples=60)
def test_is_the_complex_rotation_of_each_pair(
    seed: int, tokens: int, num_heads: int, num_pairs: int, interleaved: bool
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, num_heads, 2 * num_pairs)
    cos, sin = angles(torch.randint(0, 1000, (tokens,)), num_pairs)
    got = apply_rope(x, cos, sin, interleaved)
    for t in range(tokens):
        for h in range(num_heads):
            for i in range(num_pairs):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + num_pairs)
                turn = complex(cos[t, i], sin[t, i])
                want = complex(x[t, h, a], x[t, h, b]) * turn
                assert abs(complex(got[t, h, a], got[t, h, b]) - want) < 1e-5


@given(seeds, heads, pairs, st.booleans())
@settings(deadline=None, max_examples=60)
def test_keeps_the_norm(seed: int, num_heads: int, num_pairs: int, interleaved: bool) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, num_heads, 2 * num_pairs)
    cos, sin = angles(torch.tensor([0, 1, 77, 9999]), num_pairs)
    got = apply_rope(x, cos, sin, interleaved)
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(got[0], x[0])  # position 0 is not turned


@given(seeds, pairs, st.booleans(), st.integers(0, 400), st.integers(0, 400))
@settings(deadline=None, max_examples=60)
def test_scores_depend_on_the_distance_only(
    seed: int, num_pairs: int, interleaved: bool, distance: int, shift: int
) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(2, 1, 2 * num_pairs)

    def score(q_position: int, k_position: int) -> float:
        q_cos_sin = angles(torch.tensor([q_position]), num_pairs)
        k_cos_sin = angles(torch.tensor([k_position]), num_pairs)
        roped = apply_rope(q, *q_cos_sin, interleaved) * apply_rope(k, *k_cos_sin, interleaved)
        return float(roped.sum())

    # float32 angles of up to 800 carry an error of 800 * 2**-24 each.
    bound = 4 * 800 * 2**-24 * float(q.norm() * k.norm()) + 1e-5
    assert abs(score(distance, 0) - score(distance + shift, shift)) < bound


@given(seeds, heads, pairs)
@settings(deadline=None, max_examples=60)
def test_layouts_differ_by_the_order_of_elements_only(
    seed: int, num_heads: int, num_pairs: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, num_heads, 2 * num_pairs)
    cos, sin = angles(torch.tensor([3, 50, 7]), num_pairs)

    def halves(y: torch.Tensor) -> torch.Tensor:
        return torch.cat((y[..., 0::2], y[..., 1::2]), dim=-1)

    torch.testing.assert_close(
        halves(apply_rope(x, cos, sin, interleaved=True)),
        apply_rope(halves(x), cos, sin, interleaved=False),
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_takes_slices_of_merged_projections(interleaved: bool) -> None:
    merged = torch.randn(1, 2, 13)  # an odd width: the slice begins at an odd element
    cos, sin = angles(torch.tensor([5]), 4)
    for x in (merged[:, :, 5:], merged[:, 0, 3:11], merged[:, 1, 5:]):
        got = apply_rope(x, cos, sin, interleaved)
        assert torch.equal(got, apply_rope(x.clone(), cos, sin, interleaved))
        assert got.is_contiguous()


@pytest.mark.parametrize("interleaved", [True, False])
def test_one_head_may_come_without_its_dimension(interleaved: bool) -> None:
    x = torch.randn(6, 8)
    cos, sin = angles(torch.arange(6), 4)
    got = apply_rope(x, cos, sin, interleaved)
    assert torch.equal(got, apply_rope(x[:, None], cos, sin, interleaved)[:, 0])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computes_16_bits_in_float32(interleaved: bool, dtype: torch.dtype) -> None:
    """Each element is the exact one, rounded once."""
    x = torch.randn(64, 2, 8).to(dtype)
    cos, sin = angles(torch.arange(64) * 1000, 4)
    got = apply_rope(x, cos, sin, interleaved)
    assert got.dtype == dtype
    parts = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    first, second = (part.double() for part in parts)
    c, s = cos[:, None].double(), sin[:, None].double()
    rotated = (first * c - second * s, second * c + first * s)
    exact = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((got.double() - exact).abs() <= rounding + 1e-6).all()  # float32 itself: below 1e-6


@pytest.mark.parametrize("interleaved", [True, False])
def test_leaves_its_input_alone(interleaved: bool) -> None:
    x = torch.randn(2, 2, 8)
    before = x.clone()
    apply_rope(x, *angles(torch.arange(2), 4), interleaved)
    assert torch.equal(x, before)


def test_names_widths_that_do_not_agree() -> None:
    cos, sin = angles(torch.arange(2), 3)
    with pytest.raises(ValueError, match=r"\(2, 1, 8\).*\(2, 3\)"):
        apply_rope(torch.randn(2, 1, 8), cos, sin, interleaved=True)
