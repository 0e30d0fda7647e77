"""The indexer's choice from pages against scores in float64 and a stable sort."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import index_logits, index_topk
from kernels.index_topk import rows_of


def cache(
    num: int, num_pages: int, page: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index keys [rows, dim] and a page table [num, num_pages]."""
    keys = torch.randn(((num * num_pages) + 1) * page, dim, device=device).to(dtype)
    order = 1 + torch.randperm(num * num_pages, device=device)
    return keys, order.view(num, num_pages).int()


def whole(num: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device):
    """Queries and weights of small whole numbers: scores are exact in any order, and they tie."""
    q = torch.randint(-2, 3, (num, heads, dim), device=device).to(dtype)
    return q, torch.randint(-2, 3, (num, heads), device=device).float()


def scores_of(q, weights, keys, pages, page: int) -> torch.Tensor:
    """[N, P · page] float64 for pages [N, P]."""
    rows = (pages.long()[..., None] * page + torch.arange(page, device=pages.device)).flatten(1)
    products = torch.einsum("nhd,nkd->nhk", q.double(), keys[rows].double()).relu()
    return (products * weights.double()[..., None]).sum(1)


def best(scores: torch.Tensor, seen: int, k: int) -> list[int]:
    order = scores[:seen].sort(descending=True, stable=True).indices[:k].sort().values.tolist()
    return order + [-1] * (k - len(order))


# Triton's interpreter multiplies no bfloat16.
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * torch.cuda.is_available()
CASES = [(4, 16, 16, DTYPES[0]), (9, 32, 64, DTYPES[-1]), (1, 48, 4, torch.float32)]


@pytest.mark.parametrize("heads, dim, page, dtype", CASES)
def test_causal_choice(heads, dim, page, dtype, device) -> None:
    start, num = 43, 5
    keys, pages = cache(1, -(-(start + num) // page) + 1, page, dim, dtype, device)
    keys = keys.mul(1.2).round()
    keys[int(pages[0, -1]) * page :][:page] = torch.nan  # not of this context
    q, weights = whole(num, heads, dim, dtype, device)
    for topk in (47, 46, 12):  # beyond the first only one query has a choice
        got = index_topk.causal(q, weights, keys, pages[0], start, page, topk, 3 * 64 * 4)
        want = scores_of(q, weights, keys, pages[:, :-1].expand(num, -1), page)
        assert got.tolist() == [best(want[i], start + i + 1, topk) for i in range(num)]


@pytest.mark.parametrize("heads, dim, page, dtype", CASES)
def test_paged_choice(heads, dim, page, dtype, device) -> None:
    contexts = torch.tensor([64, 0, 12, 13, 50], device=device)
    keys, pages = cache(5, -(-64 // page), page, dim, dtype, device)
    keys = keys.mul(1.2).round()
    q, weights = whole(5, heads, dim, dtype, device)
    want = scores_of(q, weights, keys, pages, page)
    for n, context in enumerate(contexts.tolist()):  # what a context has not written
        for position in range(context, pages.shape[1] * page):
            keys[int(pages[n, position // page]) * page + position % page] = torch.nan
    got, num = index_topk.paged(q, weights, keys, pages, contexts, page, 12)
    assert num.tolist() == contexts.clamp_max(12).tolist()
    assert got.tolist() == [best(want[n], c, 12) for n, c in enumerate(contexts.tolist())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores(dtype, device) -> None:
    """Sums are in float32 whatever the dtype: the products of 16-bit numbers are exact there."""
    keys, pages = cache(3, 5, 64, 64, dtype, device)
    q = torch.randn(3, 8, 64, device=device).to(dtype)
    weights = torch.randn(3, 8, device=device)
    want = scores_of(q, weights, keys, pages, 64)
    out = torch.full((3, 320), torch.nan, device=device)
    counts = torch.tensor([320, 100, 1], device=device)
    index_logits.paged(q, weights, keys, pages, counts, 64, out, 2)
    for n, count in enumerate(counts.tolist()):
        error = (out[n, :count].double() - want[n, :count]).norm() / want[n, :count].norm()
        assert error < 1e-6 and bool(out[n, count:].isnan().all())
    out = torch.full((3, 320), torch.nan, device=device)
    index_logits.causal(q, weights, keys, pages[0], 200, 64, out)
    want = scores_of(q, weights, keys, pages[:1].expand(3, -1), 64)
    for i in range(3):
        seen = 201 + i
        error = (out[i, :seen].double() - want[i, :seen]).norm() / want[i, :seen].norm()
        assert error < 1e-6


def test_rows(device: torch.device) -> None:
    pages = torch.randint(0, 50, (5, 6), device=device, dtype=torch.int32)
    positions = torch.randint(-1, 24, (5, 33), device=device, dtype=torch.int32)
    for own, at in ((pages, positions), (pages[0], positions[2])):
        want = rows_of(own.cpu(), at.cpu(), 4)
        assert torch.equal(index_topk.rows_of(own, at, 4).cpu(), want)
