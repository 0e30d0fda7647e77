"""The Hopper kernel for latents against softmax in float64: ragged counts, heads that fill no tile,
rows and pages, whole queries, pieces and parts."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import Partial, merge
from kernels.gpu import attention, mla_hopper

LATENT, WIDTH, SCALE = 512, 576, 0.07
COUNTS = (700, 0, 1, 63, 64, 65, 127, 128, 129, 640)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
pytestmark = needs_hopper


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def check(found: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor) -> None:
    """Each query n over rows[n, : COUNTS[n]]."""
    assert not found.isnan().any()
    for n, count in enumerate(COUNTS):
        if count == 0:
            assert bool((found[n] == 0).all())
            continue
        own = cache[rows[n, :count].long()].double()
        want = (q[n].double() @ own.t() * SCALE).softmax(-1) @ own[:, :LATENT]
        assert float((found[n].double() - want).norm() / want.norm()) < 5e-3


def poisoned(num_rows: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cache that holds NaN but in the rows that are read."""
    cache = torch.full((num_rows, WIDTH), torch.nan, device="cuda", dtype=dtype)
    for own, count in zip(rows.long(), COUNTS, strict=True):
        cache[own[:count]] = draw(count, WIDTH, dtype=dtype)
    return cache


@pytest.mark.parametrize("pieces", [None, 1, 3, 6])
@pytest.mark.parametrize("heads", [128, 64, 40, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows(heads: int, dtype: torch.dtype, pieces: int | None) -> None:
    torch.manual_seed(heads)
    rows = torch.randint(0, 5000, (len(COUNTS), 700), device="cuda")
    counts = torch.tensor(COUNTS, device="cuda")
    cache = poisoned(5001, rows, dtype)
    for n, count in enumerate(COUNTS):
        rows[n, count:] = -1
    q = draw(len(COUNTS), heads, WIDTH, dtype=dtype)
    found = mla_hopper.mla_latents(q, cache, rows, counts, 0, SCALE, 132, pieces)
    check(found, q, cache, rows)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("num_processors", [1, 7, 132])
def test_pages(page_size: int, num_processors: int) -> None:
    """Also with so few programs that each takes many queries one after the other."""
    torch.manual_seed(page_size)
    width = -(-700 // page_size)
    pages = torch.randint(0, 90, (len(COUNTS), width), device="cuda", dtype=torch.int32)
    rows = pages.unsqueeze(-1) * page_size + torch.arange(page_size, device="cuda")
    rows = rows.flatten(1)
    cache = poisoned(91 * page_size, rows, torch.bfloat16)
    counts = torch.tensor(COUNTS, device="cuda", dtype=torch.int32)
    q = draw(len(COUNTS), 128, WIDTH)
    found = mla_hopper.mla_latents(q, cache, pages, counts, page_size, SCALE, num_processors)
    check(found, q, cache, rows)


@pytest.mark.parametrize("heads", [16, 128])
def test_parts_merge(heads: int) -> None:
    """Rows in two parts, of which one may be empty."""
    torch.manual_seed(3)
    rows = torch.randint(0, 5000, (len(COUNTS), 700), device="cuda")
    cache = poisoned(5000, rows, torch.bfloat16)
    q = draw(len(COUNTS), heads, WIDTH)
    counts = torch.tensor(COUNTS, device="cuda")
    merged: Partial | None = None
    for a, b in ((0, 100), (100, 700)):
        own = counts.clamp(a, b) - a
        part = attention.mla_rows_part(q, cache, rows[:, a:b], own, LATENT, SCALE)
        merged = merge(merged, part)
    assert merged is not None
    check(merged.out, q, cache, rows)


def test_rows_beyond_two_to_the_31_elements() -> None:
    cache = torch.empty(4_000_000, WIDTH, device="cuda", dtype=torch.bfloat16)
    rows = torch.randint(3_900_000, 4_000_000, (len(COUNTS), 700), device="cuda").int()
    cache[3_900_000:].normal_()
    q = draw(len(COUNTS), 64, WIDTH)
    counts = torch.tensor(COUNTS, device="cuda")
    check(mla_hopper.mla_latents(q, cache, rows, counts, 0, SCALE, 132), q, cache, rows)


def test_a_graph_follows_its_inputs() -> None:
    """Captured once; other counts, rows and queries at each replay."""
    rows = torch.zeros(len(COUNTS), 700, device="cuda", dtype=torch.int32)
    counts = torch.ones(len(COUNTS), device="cuda", dtype=torch.int32)
    q, cache = draw(len(COUNTS), 128, WIDTH), draw(3000, WIDTH)
    attention.mla_latents(q, cache, rows, counts, 0, LATENT, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention.mla_latents(q, cache, rows, counts, 0, LATENT, SCALE)
    for _ in range(3):
        rows.random_(0, 3000)
        counts.copy_(torch.tensor(COUNTS))
        q.normal_()
        graph.replay()
        check(found, q, cache, rows)
