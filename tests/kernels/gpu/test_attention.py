"""The attention ports' GPU forms against softmax in float64, row by row. Rows and pages that no
query may read hold NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import triton

from kernels.gpu import attention as gpu
from kernels.gpu import causal, mla
from kernels.gpu.card import Card

PAGE = 8
NUM_PAGES = 24
CONTEXTS = (64, 0, 17, 1, 47)  # of the decodes: full pages, none, in part
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


# The interpreter multiplies no bfloat16.
DTYPES = [d for d in TOLERANCE if d != torch.bfloat16 or not triton.knobs.runtime.interpret]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def draw(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def some_pages(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Page tables [N, P] of CONTEXTS, the never written last page behind each; counts."""
    pages = torch.stack([torch.randperm(NUM_PAGES - 1)[:8] for _ in CONTEXTS]).int()
    for own, context in zip(pages, CONTEXTS, strict=True):
        own[-(-context // PAGE) :] = NUM_PAGES - 1
    return pages.to(device), torch.tensor(CONTEXTS, dtype=torch.int32, device=device)


def rows_of(pages: torch.Tensor) -> torch.Tensor:
    return (pages.long().unsqueeze(-1) * PAGE + torch.arange(PAGE, device=pages.device)).flatten(-2)


def poison(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Only `rows` stay."""
    kept = torch.full_like(cache, torch.nan)
    kept[rows] = cache[rows]
    return kept


def softmaxed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [.., D], k [L, D], v [L, V] -> [.., V] float64"""
    return (q.double() @ k.double().t() * scale).softmax(-1) @ v.double()


def check(found: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - want).norm() / want.norm()
    assert error < TOLERANCE[dtype], float(error)  # NaN too fails


@pytest.mark.parametrize(
    ("heads", "latent", "rope", "has_latent_part"),
    [(3, 32, 16, True), (18, 40, 24, False)],
)
@pytest.mark.parametrize(
    ("num_processors", "by_page"), [(1, True), (6, False)], ids=["whole pages", "shared rows"]
)
def test_mla_reads_its_own_rows(
    heads: int,
    latent: int,
    rope: int,
    has_latent_part: bool,
    num_processors: int,
    by_page: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    pages, counts = some_pages(device)
    width = latent + rope if has_latent_part else rope
    q = draw(len(CONTEXTS), heads, width, dtype=dtype, device=device)
    cache = draw(NUM_PAGES * PAGE, latent + rope, dtype=dtype, device=device)
    cache[-PAGE:] = torch.nan
    rows = rows_of(pages)
    index = pages
    if not by_page:
        columns = torch.arange(rows.shape[1], device=device)
        index = torch.where(columns < counts.unsqueeze(1), rows, -1)
    found = mla.mla_latents(
        q,
        cache,
        index,
        counts,
        PAGE if by_page else 0,
        latent,
        0.2,
        Card(num_processors, 9, 1 << 17),
    )
    assert found.dtype == dtype
    for n, context in enumerate(CONTEXTS):
        if context == 0:
            assert bool((found[n] == 0).all())
            continue
        own = cache[rows[n, :context]]
        check(found[n], softmaxed(q[n], own[:, -width:], own[:, :latent], 0.2), dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(17, 1, 64), (4, 2, 24)])
def test_gqa_reads_its_own_pages(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    pages, counts = some_pages(device)
    q = draw(len(CONTEXTS), heads, dim, dtype=dtype, device=device)
    keys = draw(NUM_PAGES * PAGE, kv_heads, dim, dtype=dtype, device=device)
    values = draw(NUM_PAGES * PAGE, kv_heads, dim, dtype=dtype, device=device)
    keys[-PAGE:], values[-PAGE:] = torch.nan, torch.nan
    found = gpu.gqa_paged(q, keys, values, pages, counts, PAGE, 0.3)
    assert found.dtype == dtype
    for n, context in enumerate(CONTEXTS):
        if context == 0:
            assert bool((found[n] == 0).all())
            continue
        own = rows_of(pages[n])[:context]
        for h in range(heads):
            k, v = keys[own, h * kv_heads // heads], values[own, h * kv_heads // heads]
            check(found[n, h], softmaxed(q[n, h], k, v, 0.3), dtype)


# The last query of the first sees a key more than whole blocks hold.
@pytest.mark.parametrize(("start", "num"), [(0, 65), (70, 33), (60, 2)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 1, 24)])
def test_gqa_prefill(
    start: int,
    num: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    context = start + num
    pages = torch.randperm(NUM_PAGES, device=device)[: -(-context // PAGE)].int()
    rows = rows_of(pages)[:context]
    q = draw(num, heads, dim, dtype=dtype, device=device)
    keys = poison(draw(NUM_PAGES * PAGE, kv_heads, dim, dtype=dtype, device=device), rows)
    values = poison(draw(NUM_PAGES * PAGE, kv_heads, dim, dtype=dtype, device=device), rows)
    found = gpu.gqa_causal(q, keys, values, pages, start, PAGE, 0.3)
    assert found.dtype == dtype
    for i in range(num):
        own = rows[: start + i + 1]
        for h in range(heads):
            k, v = keys[own, h * kv_heads // heads], values[own, h * kv_heads // heads]
            check(found[i, h], softmaxed(q[i, h], k, v, 0.3), dtype)


@pytest.mark.parametrize(("start", "num"), [(0, 37), (60, 21), (90, 1)])
@pytest.mark.parametrize("nope", [24, 0])
def test_mla_prefill(
    start: int,
    num: int,
    nope: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Expanded in several parts where that is cheaper, absorbed where there is one query."""
    heads, rank, rope, value = 2, 32, 16, 24
    monkeypatch.setattr(gpu, "_EXPANDED_BYTES", 3 * PAGE * heads * (nope + value) * dtype.itemsize)
    context = start + num
    pages = torch.randperm(NUM_PAGES, device=device)[: -(-context // PAGE)].int()
    rows = rows_of(pages)[:context]
    cache = poison(draw(NUM_PAGES * PAGE, rank + rope, dtype=dtype, device=device), rows)
    w_uk = draw(heads, nope, rank, dtype=dtype, device=device) / 4
    w_uv = draw(heads, value, rank, dtype=dtype, device=device)
    q_nope = draw(num, heads, nope, dtype=dtype, device=device)
    q_pe = draw(num, heads, rope, dtype=dtype, device=device)
    found = gpu.mla_causal(q_nope, q_pe, cache, pages, start, PAGE, w_uk, w_uv, 0.2)
    assert found.dtype == dtype
    latent, k_pe = cache[rows, :rank].double(), cache[rows, rank:].double()
    for h in range(heads):
        k = torch.cat((latent @ w_uk[h].double().t(), k_pe), dim=-1)
        v = latent @ w_uv[h].double().t()
        q = torch.cat((q_nope[:, h], q_pe[:, h]), dim=-1)
        for i in range(num):
            want = softmaxed(q[i], k[: start + i + 1], v[: start + i + 1], 0.2)
            check(found[i, h], want, dtype)


def test_parts_merge_and_queries_may_be_strided(dtype: torch.dtype, device: torch.device) -> None:
    """Queries at 3, 8, 13, ... over keys in three parts; in the last some queries see nothing, and
    one before the first key sees nothing at all."""
    first, stride, num, dim = -2, 5, 21, 16
    cuts = (0, 40, 41, 100)
    q = draw(num, 4, dim, dtype=dtype, device=device)
    keys = draw(100, 2, dim, dtype=dtype, device=device)
    values = draw(100, 2, dim, dtype=dtype, device=device)
    out = torch.full((num, 4, dim), torch.nan, device=device)
    lse = torch.full((num, 4), torch.nan, device=device)
    for a, b in itertools.pairwise(cuts):
        part = causal.Keys(keys[a:b], values[a:b])
        causal.attend_causal(q, part, b - a, first - a, stride, 0.3, out, lse, merges=a > 0)
    assert bool((out[0] == 0).all()) and bool((lse[0] == -torch.inf).all())
    for i in range(1, num):
        seen = min(100, first + i * stride + 1)
        for h in range(4):
            scores = keys[:seen, h // 2].double() @ q[i, h].double() * 0.3
            check(out[i, h], scores.softmax(0) @ values[:seen, h // 2].double(), dtype)
            assert abs(float(lse[i, h]) - float(scores.logsumexp(0))) < 1e-3


@pytest.mark.parametrize("num", [1, 70_000])
def test_a_launch_has_no_more_programs_than_a_card_takes(
    num: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65535 at most in all dimensions of a grid but the first; a step may have more queries."""
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **sizes: None

    for kernel in ("_whole", "_shared"):
        monkeypatch.setattr(mla, kernel, Recorder())
    monkeypatch.setattr(mla, "merge", lambda *args: None)
    q, cache = torch.zeros(num, 17, 32, device=device), torch.zeros(4, 32, device=device)
    rows = torch.zeros(num, 2, dtype=torch.int32, device=device)
    counts, lse = rows[:, 0], torch.empty(num, 17, 1, device=device)
    card = Card(4, 8, 1 << 17)
    mla.mla_latents(q, cache, rows, counts, 0, 16, 0.2, card)
    mla.mla_part(q, cache, rows, counts, 16, 0.2, card, q, lse)
    assert len(grids) == 2
    assert all(size <= 65535 for grid in grids for size in grid[1:])
    assert math.prod(grids[1]) == 2 * num


def test_what_is_declined(device: torch.device) -> None:
    q, cache = torch.zeros(1, 2, 300, device=device), torch.zeros(4, 300, device=device)
    assert gpu.declines(q, cache, 260) is None
    assert "bfloat16" in (gpu.declines(q, cache.bfloat16(), 260) or "")
    assert "2048" in (gpu.declines(q, cache, 2048) or "")
    assert "8 wide; 16 to 1023" in (gpu.declines(q, cache, 8) or "")
    assert "300" in (gpu.declines(q, cache) or "")
    assert "132 bytes" in (gpu.declines(q[..., :64], torch.zeros(4, 33, device=device), 32) or "")
    assert "40 bytes" in (gpu.declines(q, cache, 260, (64, 10)) or "")
