"""The indexer's choice from pages against scores in float64 and a stable sort."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernels.index_logits as reference
from kernels.fp8_keys import E4M3, Fp8Keys, store_keys
from kernels.fp8_keys import quantise_queries as reference_queries
from kernels.gpu import fp8, index_logits, index_tiles, index_topk
from kernels.gpu.card import Card, card_of
from kernels.index_topk import rows_of
from tests.kernels.fp8_by_hand import HARD


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


def hold_in_fp8(keys: torch.Tensor, page: int) -> Fp8Keys:
    """Pages of these keys; those of NaN are bytes of 0xFF, as are their scales."""
    cache = Fp8Keys(
        torch.full(
            (len(keys) // page, page * (keys.shape[1] + 4)),
            0xFF,
            dtype=torch.uint8,
            device=keys.device,
        ),
        page,
    )
    rows = (~keys.isnan().any(1)).nonzero()[:, 0]
    fp8.store_keys(cache, rows, rows, keys)
    return cache


FP8_CASES = [(4, 16, 16, DTYPES[0]), (9, 48, 64, DTYPES[-1]), (1, 256, 4, torch.float32)]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("heads, dim, page, dtype", FP8_CASES)
def test_choices_in_fp8(heads, dim, page, dtype, native, device, monkeypatch) -> None:
    """Small whole numbers are e4m3's, also by powers of two: every choice is exact."""
    if device.type == "cuda" and native and not card_of(device).multiplies_fp8:
        pytest.skip("this card does not multiply e4m3")
    own = replace(card_of(device), multiplies_fp8=native)
    monkeypatch.setattr(index_logits, "card_of", lambda device: own)
    start, num = 43, 5
    keys, pages = cache(1, -(-(start + num) // page) + 1, page, dim, dtype, device)
    keys = keys.mul(1.2).round()
    keys[int(pages[0, -1]) * page :][:page] = torch.nan
    q, weights = whole(num, heads, dim, dtype, device)
    want = scores_of(q, weights, keys, pages[:, :-1].expand(num, -1), page)
    held = hold_in_fp8(keys, page)
    for topk in (46, 12):
        got = index_topk.causal(q, weights, held, pages[0], start, page, topk, 3 * 64 * 4)
        assert got.tolist() == [best(want[i], start + i + 1, topk) for i in range(num)]
    contexts = torch.tensor([64, 0, 12, 13, 50], device=device)
    keys, pages = cache(5, -(-64 // page), page, dim, dtype, device)
    keys = keys.mul(1.2).round()
    want = scores_of(q, weights, keys, pages, page)
    for n, context in enumerate(contexts.tolist()):
        for position in range(context, pages.shape[1] * page):
            keys[int(pages[n, position // page]) * page + position % page] = torch.nan
    got, num_chosen = index_topk.paged(
        q, weights, hold_in_fp8(keys, page), pages, contexts, page, 12
    )
    assert num_chosen.tolist() == contexts.clamp_max(12).tolist()
    assert got.tolist() == [best(want[n], c, 12) for n, c in enumerate(contexts.tolist())]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("heads, dim, page", [(8, 128, 64), (9, 256, 64), (3, 80, 16)])
def test_scores_in_fp8(heads, dim, page, native, device) -> None:
    """Those of the torch form: only the order of sums may differ."""
    if device.type == "cuda" and native and not card_of(device).multiplies_fp8:
        pytest.skip("this card does not multiply e4m3")
    # Tensor cores add the products of e4m3 with 13 binary digits after the point.
    tolerance = 1e-3 if device.type == "cuda" and native else 1e-6
    num_pages = 200 // page + 1
    keys, pages = cache(3, num_pages, page, dim, torch.float32, device)
    keys *= torch.logspace(-4, 4, len(keys), base=2, device=device)[:, None]
    q = torch.randn(3, heads, 2 * dim, device=device)[..., dim:]
    weights = torch.randn(3, heads, device=device)
    held = hold_in_fp8(keys, page)
    own, scaled = fp8.quantise_queries(q, weights)
    inside = torch.arange(page, device=device)
    rows = (pages.long()[..., None] * page + inside).flatten(1)
    counts = torch.tensor([200, 100, 1], device=device)
    want = [
        reference.index_logits(q[n, None], weights[n, None], held[rows[n]])[0] for n in range(3)
    ]
    out = torch.full((3, num_pages * page), torch.nan, device=device)
    index_logits.paged(own, scaled, held, pages, counts, page, out, 2, native=native)
    for n, count in enumerate(counts.tolist()):
        error = (out[n, :count] - want[n][:count]).norm()
        assert error <= tolerance * want[n][:count].norm()
        assert bool(out[n, count:].isnan().all())
    out = torch.full((3, num_pages * page), torch.nan, device=device)
    index_logits.causal(own, scaled, held, pages[0], 150, page, out, native=native)
    want = reference.index_logits(q, weights, held[rows[0]])
    for i in range(3):
        seen = 151 + i
        error = (out[i, :seen] - want[i, :seen]).norm()
        assert error <= tolerance * want[i, :seen].norm()


@pytest.mark.parametrize("page", [1, 4, 64])
def test_keys_are_quantised_as_the_torch_form_does(page, device) -> None:
    """To the byte, and no other byte is written."""
    hard = torch.tensor([row * 2 for row in HARD])
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float().nan_to_num(0.0).view(-1, 16)
    every[:, 0] = 448.0
    keys = torch.cat((hard, torch.randn(200, 16), hard.flip(1), every))
    num_pages = -(-len(keys) // page)
    blank = torch.full((num_pages, page * 20), 0xFF, dtype=torch.uint8)
    some = torch.randperm(len(keys))[:150]
    rows = torch.randperm(num_pages * page)
    for where, tokens in ((rows[:150], some), (rows[: len(keys)], None)):
        want = Fp8Keys(blank.clone(), page)
        store_keys(want, where, tokens, keys)
        got = Fp8Keys(blank.to(device), page)
        source = None if tokens is None else tokens.to(device)
        fp8.store_keys(got, where.to(device), source, keys.to(device))
        assert torch.equal(got.pages.cpu(), want.pages)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_quantised_as_the_torch_form_does(dtype, device) -> None:
    q = torch.randn(7, 5, 64, device=device).to(dtype)[..., :48]
    weights = torch.randn(7, 6, device=device)[:, :5]
    got, scaled = fp8.quantise_queries(q, weights)
    want, want_scaled = reference_queries(q.cpu(), weights.cpu())
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scaled.cpu(), want_scaled)


@pytest.mark.parametrize("kibibytes", [99, 163, 227])  # sm_86 and sm_89; sm_80; sm_90
@pytest.mark.parametrize("heads, dim", [(64, 128), (32, 128), (9, 256), (64, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
def test_tiles_fit_the_card(kibibytes: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Queries, and the blocks of keys that are under way beside the one that is multiplied."""
    card = Card(100, 9 if kibibytes == 227 else 8, kibibytes << 10)
    tiles = [index_tiles.causal_tile(heads, dim, dtype, card)]
    tiles += [index_tiles.paged_tile(num, heads, dim, dtype, card) for num in (1, 16, 128)]
    for tile in tiles:
        columns = tile.queries * max(16, 1 << (heads - 1).bit_length())
        rows = columns + tile.keys * (tile.stages - 1)
        assert rows * dim * dtype.itemsize <= kibibytes << 10
        assert tile.queries >= 1 and tile.stages >= 1
