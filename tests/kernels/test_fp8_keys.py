"""Quantised keys and queries against the format's definition; how pages hold keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.fp8_keys import E4M3, Fp8Keys, quantise, quantise_queries, store_keys
from kernels.index_logits import index_logits, index_logits_rows
from tests.kernels.fp8_by_hand import HARD, rounded, scale_of, value_of

DIM = 8


def poisoned(num_pages: int, page_size: int, dim: int = DIM) -> Fp8Keys:
    """All bytes 0xFF: elements and scales are NaN."""
    return Fp8Keys(
        torch.full((num_pages, page_size * (dim + 4)), 0xFF, dtype=torch.uint8), page_size
    )


def check(rows: list[list[float]]) -> None:
    values, scales = quantise(torch.tensor(rows))
    assert values.dtype == E4M3
    assert scales.tolist() == [scale_of(row) for row in rows]
    back = values.double() * scales.double().unsqueeze(1)
    assert back.tolist() == [rounded(row) for row in rows]


def test_rows_that_are_hard_to_round() -> None:
    check([torch.tensor(row).tolist() for row in HARD])


def test_every_e4m3_number_is_left_as_it_is() -> None:
    codes = [c for c in range(256) if c not in (0x7F, 0xFF)]
    check([[448.0, value_of(c), 1.0, 0.0] for c in codes])
    values, _ = quantise(torch.tensor([[448.0, *map(value_of, codes)]]))
    assert values.view(torch.uint8)[0, 1:].tolist() == codes


@given(
    st.lists(
        st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=5, max_size=5
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_row(rows: list[list[float]]) -> None:
    check(rows)


def test_what_is_no_number_stays_none() -> None:
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0]])
    values, scales = quantise(x)
    back = values.float() * scales.unsqueeze(1)
    assert [row.isfinite().all().item() for row in back] == [False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_give_their_scales_to_the_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, weights = torch.randn(3, 2, DIM).to(dtype), torch.randn(3, 2)
    values, scaled = quantise_queries(q, weights)
    for i in range(3):
        for h in range(2):
            row = q[i, h].tolist()
            assert float(scaled[i, h]) == float(weights[i, h]) * scale_of(row)
            assert values[i, h].tolist() == [x / scale_of(row) for x in rounded(row)]


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_pages_hold_keys_and_their_scales_behind_them(page_size: int) -> None:
    torch.manual_seed(2)
    cache = poisoned(5, page_size)
    assert len(cache) == 5 * page_size
    assert cache.dim == DIM
    keys = torch.randn(4, DIM)
    rows = torch.tensor([0, 5 * page_size - 1, 3 * page_size, 2 * page_size])
    store_keys(cache, rows, None, keys)
    found = cache.dequantised()
    assert found[rows].double().tolist() == [rounded(row) for row in keys.tolist()]
    assert int((~found.isnan()).any(1).sum()) == 4
    for row, key in zip(rows.tolist(), keys.tolist(), strict=True):
        page, place = divmod(row, page_size)
        raw = bytes(cache.pages[page].tolist())
        at = page_size * DIM + 4 * place
        scale = torch.frombuffer(bytearray(raw[at : at + 4]), dtype=torch.float32)
        assert float(scale) == scale_of(key)
        own = [value_of(code) for code in raw[place * DIM : (place + 1) * DIM]]
        assert [float(scale) * x for x in own] == rounded(key)


def test_some_tokens_of_several() -> None:
    torch.manual_seed(3)
    keys, tokens = torch.randn(6, DIM), torch.tensor([4, 0, 5])
    rows = torch.tensor([7, 3, 9])
    for source in (keys, Fp8Keys.quantised(keys)):
        cache = poisoned(3, 4)
        store_keys(cache, rows, tokens, source)
        assert torch.equal(cache[rows].pages, Fp8Keys.quantised(keys[tokens]).pages)
        assert int((~cache.dequantised().isnan()).any(1).sum()) == 3


def test_rows_are_taken_as_they_lie() -> None:
    torch.manual_seed(4)
    keys = torch.randn(12, DIM)
    packed, paged = Fp8Keys.quantised(keys), poisoned(3, 4)
    store_keys(paged, torch.arange(12), None, keys)
    for cache in (packed, paged):
        for rows in (torch.tensor([11, 0, 3, 3]), slice(2, 9), slice(0, 0)):
            assert torch.equal(cache[rows].dequantised(), packed.dequantised()[rows])
            assert len(cache[rows]) == len(keys[rows])


def scores_by_hand(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [T, H, D], weights [T, H], keys [L, D] -> [T, L] float64, of the rounded rows."""
    own_q, own_k = (
        torch.tensor([rounded(row) for row in x.reshape(-1, DIM).tolist()], dtype=torch.float64)
        for x in (q, keys)
    )
    dots = (own_q @ own_k.t()).relu().view(*q.shape[:2], -1)
    return torch.einsum("th,thl->tl", weights.double(), dots)


@pytest.mark.parametrize("page_size", [1, 4])
def test_scores_are_those_of_the_rounded_rows(page_size: int) -> None:
    torch.manual_seed(5)
    q, weights, keys = torch.randn(3, 5, DIM), torch.randn(3, 5), 3 * torch.randn(8, DIM)
    cache = poisoned(3, page_size) if page_size > 1 else poisoned(12, 1)
    rows = torch.randperm(12)[:8]
    store_keys(cache, rows, None, keys)
    want = scores_by_hand(q, weights, keys)
    got = index_logits(q, weights, cache[rows])
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)
    counts = torch.tensor([8, 1, 5])
    columns = torch.arange(8) < counts.unsqueeze(1)
    own = torch.where(columns, rows.expand(3, -1), rows[0])
    got = index_logits_rows(q, weights, cache, own, counts)
    want = want.masked_fill(~columns, -torch.inf)
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)
