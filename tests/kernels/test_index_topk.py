"""The indexer's choice from pages against scores in float64 and a stable sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.index_topk
from kernels.index_topk import causal, paged, rows_of

PAGE, DIM = 4, 8


def paged_keys(num_pages: int, contexts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index keys of small whole numbers, so that scores are exact and tie; rows that belong to no
    context are NaN. And the page table [N, num_pages], which names page 0 behind a context."""
    keys = torch.full(((len(contexts) * num_pages + 1) * PAGE, DIM), torch.nan)
    own = 1 + torch.randperm(len(contexts) * num_pages).view(len(contexts), num_pages)
    for pages, context in zip(own, contexts, strict=True):
        for position in range(context):
            row = int(pages[position // PAGE]) * PAGE + position % PAGE
            keys[row] = torch.randint(-1, 2, (DIM,)).float()
        pages[-(-context // PAGE) :] = 0
    return keys, own.int()


def by_sorting(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, pages: list[int], seen: int, k: int
) -> list[int]:
    """q [H, D], weights [H] -> the k best of the first `seen` positions, -1 behind them."""
    rows = [pages[p // PAGE] * PAGE + p % PAGE for p in range(seen)]
    dots = (keys[rows].double() @ q.double().t()).relu()  # [seen, H]
    scores = (dots @ weights.double()).tolist()
    chosen = sorted(sorted(range(seen), key=lambda i: -scores[i])[:k])
    return chosen + [-1] * (k - len(chosen))


def queries(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randint(-2, 3, (num, 3, DIM)).float()
    return q, torch.randint(-2, 3, (num, 3)).float()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 999),
    start=st.integers(0, 30),
    num=st.integers(1, 20),
    topk=st.integers(1, 24),
    workspace=st.sampled_from([1, 700, 1 << 20]),
)
def test_causal(seed: int, start: int, num: int, topk: int, workspace: int) -> None:
    torch.manual_seed(seed)
    keys, pages = paged_keys(-(-(start + num) // PAGE) + 1, [start + num])
    q, weights = queries(num)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.index_topk, "_WORKSPACE_BYTES", workspace)
        got = causal(q, weights, keys, pages[0], start, PAGE, topk)
    assert got.dtype == torch.int32
    assert got.tolist() == [
        by_sorting(q[i], weights[i], keys, pages[0].tolist(), start + i + 1, topk)
        for i in range(num)
    ]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 999),
    contexts=st.lists(st.integers(0, 28), min_size=1, max_size=5),
    topk=st.integers(1, 24),
    workspace=st.sampled_from([1, 1 << 20]),
)
def test_paged(seed: int, contexts: list[int], topk: int, workspace: int) -> None:
    torch.manual_seed(seed)
    keys, pages = paged_keys(7, contexts)
    keys[:PAGE] = 0.0  # the dummy page, which is what an empty context reads
    q, weights = queries(len(contexts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.index_topk, "_WORKSPACE_BYTES", workspace)
        got, num = paged(q, weights, keys, pages, torch.tensor(contexts), PAGE, topk)
    assert num.tolist() == [min(c, topk) for c in contexts]
    assert got.tolist() == [
        by_sorting(q[n], weights[n], keys, pages[n].tolist(), c, topk)
        for n, c in enumerate(contexts)
    ]


def test_rows_of() -> None:
    pages = torch.tensor([[7, 3], [5, 0]], dtype=torch.int32)
    positions = torch.tensor([[0, 5, -1], [3, 2, -1]])
    assert rows_of(pages, positions, 4).tolist() == [[28, 13, 28], [23, 22, 20]]
    assert rows_of(pages[0], positions[0], 4).tolist() == [28, 13, 28]


def test_refuses_pages_that_do_not_hold_the_context() -> None:
    q, weights = queries(3)
    with pytest.raises(ValueError, match="need 9 tokens, 2 pages of 4 hold 8"):
        causal(q, weights, torch.zeros(40, DIM), torch.tensor([1, 2]), 6, PAGE, 2)
