"""Exact top-k against a stable sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.topk import columns_of, exact_topk


def by_sorting(scores: list[float], k: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: ties by position
    chosen = sorted(i for i in order[:k] if scores[i] > float("-inf"))
    return chosen + [-1] * (min(k, len(scores)) - len(chosen))


# few distinct values: ties everywhere, both zeros, and columns that may not be chosen
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("-inf")])


@given(
    rows=st.integers(1, 12).flatmap(
        lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    k=st.integers(1, 14),
)
def test_ties_are_broken_by_position(rows: list[list[float]], k: int) -> None:
    found = exact_topk(torch.tensor(rows), k)
    assert found.tolist() == [by_sorting(row, k) for row in rows]


@given(seed=st.integers(0, 1000), k=st.integers(1, 70))
def test_distinct_scores(seed: int, k: int) -> None:
    scores = torch.randn((3, 60), generator=torch.Generator().manual_seed(seed))
    assert exact_topk(scores, k).tolist() == [by_sorting(row, k) for row in scores.tolist()]


def test_wide_rows_of_zeros() -> None:
    """relu makes exact zeros, often more than k of them."""
    scores = torch.zeros(2, 5000)
    scores[1, 4000:4003] = 1
    assert exact_topk(scores, 5).tolist() == [[0, 1, 2, 3, 4], [0, 1, 4000, 4001, 4002]]


def test_nothing_to_choose() -> None:
    assert exact_topk(torch.full((2, 3), -torch.inf), 2).tolist() == [[-1, -1], [-1, -1]]


def test_columns_of() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert columns_of(mask, 2).tolist() == [[0, 2], [-1, -1]]


def test_refuses_k_zero() -> None:
    with pytest.raises(ValueError, match="k must be positive, got 0"):
        exact_topk(torch.zeros(1, 1), 0)
