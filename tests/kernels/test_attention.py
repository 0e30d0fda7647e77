"""Attention and index scores against float64, in the torch form and the compiled one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.attention
import kernels.index_logits
from kernels.attention import Partial, attend, causal, gqa_rows, merge, mla_rows
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
    """Four queries: a run of rows, scattered rows, a mixture, a single row. Padding repeats row 0
    of the query."""
    rows = torch.randint(0, 100, (4, 70))
    rows[0] = torch.arange(20, 90)
    rows[2, 3:19] = torch.arange(50, 66)
    counts = torch.tensor([70, 69, 21, 1])
    for own, count in zip(rows, counts, strict=True):
        own[count:] = own[0]
    return rows, counts


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
    q = torch.randn(4, heads, width)
    rows, counts = some_rows()
    found = mla_rows(q, cache, rows, counts, w_uv, 0.2)
    assert found.shape == (4, heads, v_dim)
    for n in range(4):
        own = cache[rows[n, : counts[n]]]
        for h in range(heads):
            want = w_uv[h].double() @ softmaxed(q[n, h], own[:, -width:], own[:, :latent], 0.2)
            assert (found[n, h] - want).abs().max() < 1e-4


@pytest.mark.parametrize("group", [1, 3])
def test_gqa_rows(form: str, group: int) -> None:
    torch.manual_seed(6)
    keys, values = poisoned(120, 2, 12), poisoned(120, 2, 12)
    q = torch.randn(4, 2 * group, 12)
    rows, counts = some_rows()
    found = gqa_rows(q, keys, values, rows, counts, 0.3)
    for n in range(4):
        own = rows[n, : counts[n]]
        for h in range(2 * group):
            kv = h // group
            want = softmaxed(q[n, h], keys[own, kv], values[own, kv], 0.3)
            assert (found[n, h] - want).abs().max() < 1e-5


def test_rows_do_not_depend_on_the_batch(form: str) -> None:
    """One query alone and beside others: the same numbers to rounding, whatever the others are."""
    torch.manual_seed(7)
    cache, w_uv = poisoned(120, 20), torch.randn(3, 4, 12)
    q = torch.randn(4, 3, 8)
    rows, counts = some_rows()
    together = mla_rows(q, cache, rows, counts, w_uv, 0.5)
    for n in range(4):
        one = slice(n, n + 1)
        alone = mla_rows(q[one], cache, rows[one, : counts[n]], counts[one], w_uv, 0.5)
        assert (alone - together[one]).abs().max() < 1e-5


def test_index_logits_rows(form: str) -> None:
    torch.manual_seed(8)
    keys = poisoned(120, 20)
    q, weights = torch.randn(4, 6, 20), torch.randn(4, 6)
    rows, counts = some_rows()
    found = index_logits_rows(q, weights, keys, rows, counts)
    for n in range(4):
        own = keys[rows[n, : counts[n]]].double()
        want = weights[n].double() @ (q[n].double() @ own.t()).relu()
        assert (found[n, : counts[n]] - want).abs().max() < 1e-4
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
