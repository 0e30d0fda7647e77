"""Rows beyond 2**31 elements of a cache, which is what a large pool has: the same as near ones."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import attention as gpu
from kernels.gpu import index_topk, mla, store
from kernels.gpu.card import Card

PAGE = 8
CONTEXT = 30


def twins(
    *widths: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(near cache, its pages, far cache, its pages), [rows, *widths] and [P] int32, which hold the
    same context. Of the far one only those pages are ever touched."""
    width = torch.Size(widths).numel()
    num_pages = -(-CONTEXT // PAGE)
    near = torch.randn(num_pages * PAGE, *widths, device=device).half()
    last = 2**31 // width // PAGE + num_pages
    pages = torch.arange(num_pages, dtype=torch.int32, device=device)
    far = torch.empty((last + 1) * PAGE, *widths, dtype=torch.float16, device=device)
    far_pages = last - pages
    for here, there in zip(pages.tolist(), far_pages.tolist(), strict=True):
        far[there * PAGE : (there + 1) * PAGE] = near[here * PAGE : (here + 1) * PAGE]
        assert there * PAGE * width >= 2**31
    return near, pages, far, far_pages


def rows_of(pages: torch.Tensor) -> torch.Tensor:
    inside = torch.arange(PAGE, device=pages.device, dtype=torch.int32)
    return (pages.unsqueeze(-1) * PAGE + inside).flatten()


@pytest.mark.parametrize("num_processors", [1, 6])
def test_latent_attention(num_processors: int, device: torch.device) -> None:
    near, pages, far, far_pages = twins(48, device=device)
    q = torch.randn(2, 3, 48, device=device).half()
    counts = torch.tensor([CONTEXT, 7], dtype=torch.int32, device=device)
    card = Card(num_processors, 8, 1 << 17)
    for index, far_index, page_size in (
        (pages, far_pages, PAGE),
        (rows_of(pages), rows_of(far_pages), 0),
    ):
        want, found = (
            mla.mla_latents(
                q, cache, i.expand(2, -1).contiguous(), counts, page_size, 32, 0.2, card
            )
            for cache, i in ((near, index), (far, far_index))
        )
        assert torch.equal(found, want)


@pytest.mark.parametrize("num", [3, 20])
def test_grouped_query_attention(num: int, device: torch.device) -> None:
    """Of a prefill's last queries, so few that each reads for itself, or more."""
    keys, pages, far_keys, far_pages = twins(2, 16, device=device)
    q = torch.randn(num, 4, 16, device=device).half()
    want = gpu.gqa_causal(q, keys, keys, pages, CONTEXT - num, PAGE, 0.3)
    found = gpu.gqa_causal(q, far_keys, far_keys, far_pages, CONTEXT - num, PAGE, 0.3)
    assert torch.equal(found, want)


@pytest.mark.parametrize("page_size", [64, PAGE])
def test_index_choice(page_size: int, device: torch.device) -> None:
    """A block of keys that lies in one page, and one that does not."""
    width = 32
    num_pages = -(-CONTEXT // page_size)
    last = 2**31 // width // page_size + num_pages
    far = torch.empty((last + 1) * page_size, width, dtype=torch.float16, device=device)
    near = torch.randint(-2, 3, (num_pages * page_size, width), device=device).half()
    pages = torch.arange(num_pages, dtype=torch.int32, device=device)
    for here in range(num_pages):
        there = last - here
        rows = slice(here * page_size, (here + 1) * page_size)
        far[there * page_size : (there + 1) * page_size] = near[rows]
    q = torch.randint(-2, 3, (4, 2, width), device=device).half()
    weights = torch.randint(-2, 3, (4, 2), device=device).float()
    counts = torch.tensor([CONTEXT, 9, 20, 3], device=device)
    for cache, own in ((near, pages), (far, last - pages)):
        got = index_topk.causal(q, weights, cache, own, CONTEXT - 4, page_size, 6)
        chosen, _ = index_topk.paged(
            q, weights, cache, own.expand(4, -1).contiguous(), counts, page_size, 6
        )
        if cache is near:
            want = (got.tolist(), chosen.tolist())
        else:
            assert (got.tolist(), chosen.tolist()) == want


def test_rows_are_stored(device: torch.device) -> None:
    _, _, far, far_pages = twins(40, device=device)
    rows = rows_of(far_pages).long()[[3, 0, 29]]
    latent, rope = torch.randn(3, 32, device=device), torch.randn(3, 8, device=device)
    store.store_rows(far, rows, None, latent, rope)
    assert torch.equal(far[rows], torch.cat((latent, rope), dim=1).half())
