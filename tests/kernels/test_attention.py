"""Attention and index scores against float64, in the torch form and the compiled one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.attention
import kernels.index_logits
from kernels.attention import (
    Partial,
    attend,
    causal,
    gqa_causal,
    gqa_paged,
    gqa_rows,
    merge,
    mla_causal,
    mla_paged,
    mla_rows,
)
from kernels.index_logits import index_logits, index_logits_rows


@pytest.fixture(params=["compiled", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        for module in (kernels.attention, kernels.index_logits):
            monkeypatch.setattr(module, "cpu_kernels", lambda *tensors: None)
    return str(request.param)


def poisoned(num_rows: int, *widths: int) -> torch.Tensor:
    """A cache whose rows from 100 on were never written."""
    cache = torch.randn(num_rows, *widths)
    cache[100:] = torch.nan
    return cache


def some_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Five queries: a run of rows, scattered rows, a mixture, a single row, none. Padding is -1."""
    rows = torch.randint(0, 100, (5, 70))
    rows[0] = torch.arange(20, 90)
    rows[2, 3:19] = torch.arange(50, 66)
    counts = torch.tensor([70, 69, 21, 1, 0])
    for own, count in zip(rows, counts, strict=True):
        own[count:] = -1
    return rows, counts


def some_pages(page_size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pages int32, the rows they mean, counts) of five contexts in the rows below 96: full pages,
    a page in part, one token, none; pages behind a context are one that was never written."""
    pages = torch.stack([torch.randperm(12)[:6] for _ in range(5)]).int()
    counts = torch.tensor([48, 47, 17, 1, 0], dtype=torch.int32)
    for own, count in zip(pages, counts.tolist(), strict=True):
        own[-(-count // page_size) :] = 14
    rows = pages.long().unsqueeze(-1) * page_size + torch.arange(page_size)
    return pages, rows.flatten(1), counts


def softmaxed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [D], k [L, D], v [L, V] -> [V] float64."""
    return (k.double() @ q.double() * scale).softmax(0) @ v.double()


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_latent_part", [False, True])
def test_mla_rows(form: str, w_dtype: torch.dtype, has_latent_part: bool) -> None:
    torch.manual_seed(5)
    heads, latent, rope, v_dim = 5, 40, 24, 10
    cache = poisoned(120, latent + rope)
    w_uv = torch.randn(heads, v_dim, latent).to(w_dtype)
    width = latent + rope if has_latent_part else rope
    q = torch.randn(5, heads, width)
    rows, counts = some_rows()
    found = mla_rows(q, cache, rows, counts, w_uv, 0.2)
    assert found.shape == (5, heads, v_dim)
    assert bool((found[4] == 0).all())
    for n in range(4):
        own = cache[rows[n, : counts[n]]]
        for h in range(heads):
            want = w_uv[h].double() @ softmaxed(q[n, h], own[:, -width:], own[:, :latent], 0.2)
            assert (found[n, h] - want).abs().max() < 1e-4


@pytest.mark.parametrize("group", [1, 3])
def test_gqa_rows(form: str, group: int) -> None:
    torch.manual_seed(6)
    keys, values = poisoned(120, 2, 12), poisoned(120, 2, 12)
    q = torch.randn(5, 2 * group, 12)
    rows, counts = some_rows()
    found = gqa_rows(q, keys, values, rows, counts, 0.3)
    assert bool((found[4] == 0).all())
    for n in range(4):
        own = rows[n, : counts[n]]
        for h in range(2 * group):
            kv = h // group
            want = softmaxed(q[n, h], keys[own, kv], values[own, kv], 0.3)
            assert (found[n, h] - want).abs().max() < 1e-5


def test_pages_are_the_rows_they_mean(form: str) -> None:
    torch.manual_seed(10)
    pages, rows, counts = some_pages()
    cache, w_uv, q = poisoned(120, 20), torch.randn(3, 4, 12), torch.randn(5, 3, 20)
    found = mla_paged(q, cache, pages, counts, 8, w_uv, 0.5)
    assert torch.equal(found, mla_rows(q, cache, rows, counts, w_uv, 0.5))
    keys, values, q = poisoned(120, 2, 12), poisoned(120, 2, 12), torch.randn(5, 6, 12)
    found = gqa_paged(q, keys, values, pages, counts, 8, 0.3)
    assert torch.equal(found, gqa_rows(q, keys, values, rows, counts, 0.3))


@pytest.mark.parametrize(("start", "num"), [(0, 40), (5, 1), (29, 200), (0, 129)])
def test_causal_prefill_is_row_by_row_attention(start: int, num: int) -> None:
    """Query i over the pages is query i over the rows 0 .. start + i of its context."""
    torch.manual_seed(11)
    page_size, context = 8, start + num
    pages = torch.randperm(31)[: -(-context // page_size)].int()
    rows = (pages.long().unsqueeze(-1) * page_size + torch.arange(page_size)).flatten()
    rows = rows[:context].expand(num, -1)
    counts = torch.arange(start + 1, context + 1)
    written = torch.zeros(256, dtype=torch.bool)
    written[rows[0]] = True

    keys, values = torch.randn(256, 2, 12), torch.randn(256, 2, 12)
    keys[~written], values[~written] = torch.nan, torch.nan
    q = torch.randn(num, 6, 12)
    found = gqa_causal(q, keys, values, pages, start, page_size, 0.3)
    assert (found - gqa_rows(q, keys, values, rows, counts, 0.3)).abs().max() < 1e-5

    cache = torch.randn(256, 20)
    cache[~written] = torch.nan
    w_uk, w_uv = torch.randn(3, 5, 12), torch.randn(3, 4, 12)
    q_nope, q_pe = torch.randn(num, 3, 5), torch.randn(num, 3, 8)
    found = mla_causal(q_nope, q_pe, cache, pages, start, page_size, w_uk, w_uv, 0.2)
    absorbed = torch.cat((torch.einsum("nhd,hdl->nhl", q_nope, w_uk), q_pe), dim=-1)
    assert (found - mla_rows(absorbed, cache, rows, counts, w_uv, 0.2)).abs().max() < 1e-4
    no_nope = mla_causal(
        q_nope[..., :0], q_pe, cache, pages, start, page_size, w_uk[:, :0], w_uv, 0.2
    )
    assert (no_nope - mla_rows(q_pe, cache, rows, counts, w_uv, 0.2)).abs().max() < 1e-4


def test_rows_do_not_depend_on_the_batch(form: str) -> None:
    """One query alone and beside others: the same numbers to rounding, whatever the others are."""
    torch.manual_seed(7)
    cache, w_uv = poisoned(120, 20), torch.randn(3, 4, 12)
    q = torch.randn(5, 3, 8)
    rows, counts = some_rows()
    together = mla_rows(q, cache, rows, counts, w_uv, 0.5)
    for n in range(4):
        one = slice(n, n + 1)
        alone = mla_rows(q[one], cache, rows[one, : counts[n]], counts[one], w_uv, 0.5)
        assert (alone - together[one]).abs().max() < 1e-5


def test_index_logits_rows(form: str) -> None:
    torch.manual_seed(8)
    keys = poisoned(120, 20)
    q, weights = torch.randn(5, 6, 20), torch.randn(5, 6)
    rows, counts = some_rows()
    found = index_logits_rows(q, weights, keys, rows, counts)
    for n in range(5):
        own = keys[rows[n, : counts[n]]].double()
        want = weights[n].double() @ (q[n].double() @ own.t()).relu()
        torch.testing.assert_close(found[n, : counts[n]].double(), want, atol=1e-4, rtol=0)
        assert bool((found[n, counts[n] :] == -torch.inf).all())


def test_index_logits() -> None:
    torch.manual_seed(9)
    q, weights, keys = torch.randn(3, 4, 6), torch.randn(3, 4), torch.randn(11, 6)
    want = torch.einsum(
        "th,ths->ts",
        weights.double(),
        torch.einsum("thd,sd->ths", q.double(), keys.double()).relu(),
    )
    assert (index_logits(q, weights, keys) - want).abs().max() < 1e-5


@settings(max_examples=40)
@given(seed=st.integers(0, 500), cuts=st.lists(st.integers(1, 16), max_size=3, unique=True))
def test_parts_merge_to_the_whole(seed: int, cuts: list[int]) -> None:
    """Whatever the parts and the mask; queries for which a part, or all, allows nothing too."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn((2, 6, 5), generator=generator)  # 3 queries of 2 heads
    k = torch.randn((2, 17, 5), generator=generator)
    v = torch.randn((2, 17, 4), generator=generator)
    allowed = torch.rand((3, 17), generator=generator) < 0.3
    allowed[0] = False
    merged: Partial | None = None
    edges = [0, *sorted(cuts), 17]
    for a, b in itertools.pairwise(edges):
        merged = merge(merged, attend(q, k[:, a:b], v[:, a:b], allowed[:, a:b], 0.7))
    whole = attend(q, k, v, allowed, 0.7)
    assert merged is not None
    assert bool((merged.out[:, :2] == 0).all())
    assert bool((merged.lse[:, :2] == -torch.inf).all())
    assert not bool(merged.out.isnan().any())
    assert (merged.out - whole.out).abs().max() < 1e-5
    mask = allowed.repeat_interleave(2, 0)
    scores = (q.double() @ k.double().transpose(1, 2) * 0.7).masked_fill(~mask, -torch.inf)
    want = scores.softmax(-1).nan_to_num(0) @ v.double()
    assert (whole.out - want).abs().max() < 1e-5


def test_a_mask_of_the_last_keys_leaves_the_others_free() -> None:
    q, k, v = torch.randn(1, 3, 4), torch.randn(1, 9, 4), torch.randn(1, 9, 4)
    tail = causal(3, 2, -1, 1, q.device)
    full = torch.cat((torch.ones(3, 7, dtype=torch.bool), tail), dim=1)
    assert torch.equal(attend(q, k, v, tail, 1.0).out, attend(q, k, v, full, 1.0).out)
    assert tail.tolist() == [[False, False], [True, False], [True, True]]
