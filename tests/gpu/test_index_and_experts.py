"""On a CUDA device: the index, top-k, expert and sampling kernels at sizes that are served, which
tests/kernels/gpu does not reach; experts and draws wait for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import index_topk, moe, sampling
from kernels.fp8_keys import Fp8Keys, IndexKeys, store_keys
from kernels.index_logits import index_logits
from kernels.topk import exact_topk


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


@pytest.fixture
def never_waits() -> Iterator[None]:
    """What is called with it may launch, not synchronise."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("rows, width", [(3, 8193), (5, 131072), (300, 40000), (700, 12289)])
@pytest.mark.parametrize("kind", ["random", "tied", "skewed", "mostly equal"])
@pytest.mark.parametrize("k", [2048, 300])
def test_topk(rows: int, width: int, kind: str, k: int) -> None:
    scores = draw(rows, width, dtype=torch.float32)
    if kind == "tied":
        scores = (scores * 2).round()
    elif kind == "skewed":
        scores = scores.abs() ** 9
    elif kind == "mostly equal":
        scores = torch.where(scores > 2.5, scores, 0.0)
    want = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    assert torch.equal(exact_topk(scores, k), want)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("heads, dim, page", [(64, 128, 64), (32, 128, 64), (9, 256, 16)])
def test_choice_of_a_prefill_and_of_decodes(heads: int, dim: int, page: int, is_fp8: bool) -> None:
    """Both ports choose as the torch form does from the scores they compute; scores that differ in
    their last bits may swap tokens at the border, so the least score chosen is compared too."""
    num, start, topk = 70, 20000, 2048
    num_pages = -(-(start + num) // page)
    keys: IndexKeys = draw((num_pages + 2) * page, dim)
    if is_fp8:
        held = Fp8Keys(keys.new_empty((num_pages + 2, page * (dim + 4)), dtype=torch.uint8), page)
        store_keys(held, torch.arange(len(keys), device="cuda"), None, keys)
        held.pages[0] = 0xFF
        keys = held
    else:
        keys[:page] = torch.nan
    pages = (1 + torch.randperm(num_pages, device="cuda")).int()
    q, weights = draw(num, heads, dim) * dim**-0.5, draw(num, heads, dtype=torch.float32)
    got = index_topk.causal(q, weights, keys, pages, start, page, topk)
    counts = torch.arange(start + 1, start + num + 1, device="cuda")
    decoded, chosen = index_topk.paged(
        q, weights, keys, pages.expand(num, -1).contiguous(), counts, page, topk
    )
    assert torch.equal(got, decoded) and chosen.tolist() == [topk] * num
    context = torch.arange(start + num, device="cuda")
    rows = index_topk.rows_of(pages, context, page).long()
    scores = index_logits(q, weights, keys[rows])
    scores.masked_fill_(context > counts[:, None] - 1, -torch.inf)
    best = scores.topk(topk).values
    assert bool((got[:, 1:] > got[:, :-1]).all()) and bool((got >= 0).all())
    own = scores.gather(1, got.long()).sort(descending=True).values
    # Tensor cores add products of e4m3 with 13 binary digits after the point.
    assert float((own - best).abs().max() / best.abs().max()) < (1e-3 if is_fp8 else 1e-5)


@pytest.mark.parametrize("tokens", [1, 7, 33, 200, 3000])
def test_experts(tokens: int, never_waits: None) -> None:
    experts, hidden, inner, top_k = 16, 1024, 512, 4
    w13 = draw(experts, 2 * inner, hidden) / 32
    w2, x = draw(experts, hidden, inner) / 22, draw(tokens, hidden)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    weights = torch.rand(tokens, top_k, device="cuda")
    got = moe.moe(x, w13, w2, ids, weights)
    torch.cuda.set_sync_debug_mode("default")
    want = moe.moe_reference(x.double(), w13.double(), w2.double(), ids, weights.double())
    assert float((got.double() - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.05}], ids=str
)
def test_draws_are_those_of_the_cpu(filters: dict[str, float], never_waits: None) -> None:
    logits = 3 * draw(40, 129280, dtype=torch.float32)
    how = [sampling.Draw(sampling.mix(i), 0.0 if i % 5 == 0 else 0.8, **filters) for i in range(40)]
    got = sampling.draw(logits, how)
    torch.cuda.set_sync_debug_mode("default")
    assert got.tolist() == sampling.draw(logits.cpu(), how).tolist()
