"""The attention port over a scattered, poisoned pool, against a dense computation per request:
PagedAttention by the size of its blocks, and TableAttention in the kernels' torch forms."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

import kernels.streamed as streamed
from engine.attention.paged import PagedAttention
from engine.attention.tables import TableAttention
from engine.batch import ForwardBatch
from kvcache.layout import KVGeometry
from kvcache.pool import KVPool
from tests.kernels.fp8_by_hand import rounded
from tests.kvcache.transfer.pools import poison

PAGE = 4
TABLES = 0  # for block_tokens: read through page tables instead
LATENT, ROPE, NOPE, V_DIM, HEADS, INDEX_HEADS, INDEX_DIM = 12, 6, 5, 7, 3, 4, 8
MLA = KVGeometry(num_layers=1, latent_dim=LATENT + ROPE, index_dim=INDEX_DIM, index_layers=(0,))
FP8_DIM = 16
FP8 = replace(MLA, index_dim=FP8_DIM, fp8_index_keys=True)
GQA = KVGeometry(num_layers=1, num_kv_heads=2, head_dim=6)
# (cached, new): decodes, a fresh prefill, chunks with odd borders, in one batch
MIXED = [(9, 1), (0, 11), (21, 1), (13, 6), (0, 1), (5, 30)]
DECODES = [(9, 1), (30, 1), (0, 1)]


@dataclass
class Case:
    batch: ForwardBatch
    pool: KVPool
    contexts: list[int]

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """By request."""
        return list(x.split(list(self.batch.lengths)))


def make(geometry: KVGeometry, work: list[tuple[int, int]], scattered: bool = True) -> Case:
    contexts = [cached + new for cached, new in work]
    counts = [-(-context // PAGE) for context in contexts]
    pages = torch.arange(1, sum(counts) + 1)
    if scattered:
        pages = pages[torch.randperm(len(pages))]
    table = torch.zeros((len(work), max(counts) + 2), dtype=torch.int32)
    for row, own in zip(table, pages.split(counts), strict=True):
        row[: len(own)] = own
    positions = [torch.arange(cached, cached + new) for cached, new in work]
    locs = [row[p // PAGE] * PAGE + p % PAGE for row, p in zip(table, positions, strict=True)]
    batch = ForwardBatch(
        token_ids=torch.zeros(sum(new for _, new in work), dtype=torch.int64),
        positions=torch.cat(positions),
        out_loc=torch.cat(locs),
        page_table=table,
        starts=tuple(cached for cached, _ in work),
        lengths=tuple(new for _, new in work),
    )
    pool = KVPool.create(geometry, PAGE, sum(counts), torch.float32)
    poison(pool)
    return Case(batch, pool, contexts)


def as_rounded(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).tolist()
    return torch.tensor([rounded(row) for row in rows]).view(x.shape)


def attention_of(pool: KVPool, block_tokens: int) -> PagedAttention | TableAttention:
    return TableAttention(pool) if block_tokens == TABLES else PagedAttention(pool, block_tokens)


def locs_of(case: Case, request: int, begin: int, end: int) -> torch.Tensor:
    positions = torch.arange(begin, end)
    return case.batch.page_table[request][positions // PAGE] * PAGE + positions % PAGE


@dataclass
class MlaData:
    """Random inputs of one MLA layer; full contexts by request, the cached part stored."""

    case: Case
    latent: list[torch.Tensor]
    k_pe: list[torch.Tensor]
    index_keys: list[torch.Tensor]
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor

    @classmethod
    def random(
        cls,
        work: list[tuple[int, int]],
        nope: int,
        scattered: bool = True,
        geometry: KVGeometry = MLA,
    ) -> MlaData:
        case = make(geometry, work, scattered)
        index_dim = geometry.index_dim
        num_tokens = len(case.batch.token_ids)
        data = cls(
            case,
            [torch.randn(n, LATENT) for n in case.contexts],
            [torch.randn(n, ROPE) for n in case.contexts],
            [torch.randn(n, index_dim) for n in case.contexts],
            torch.randn(num_tokens, HEADS, nope),
            torch.randn(num_tokens, HEADS, ROPE),
            torch.randn(HEADS, nope, LATENT),
            torch.randn(HEADS, V_DIM, LATENT),
            torch.randn(num_tokens, INDEX_HEADS, index_dim),
            torch.randn(num_tokens, INDEX_HEADS),
        )
        if geometry.fp8_index_keys:  # numbers of e4m3, which are left as they are
            data.index_keys = [as_rounded(keys) for keys in data.index_keys]
            data.index_q = as_rounded(data.index_q)
        for b, start in enumerate(case.batch.starts):
            to = case.pool.destination(locs_of(case, b, 0, start))
            case.pool.store_latent(0, to, data.latent[b][:start], data.k_pe[b][:start])
            case.pool.store_index_key(0, to, data.index_keys[b][:start])
        return data

    def new(self, full: list[torch.Tensor]) -> torch.Tensor:
        """The new tokens' part of something by position."""
        return torch.cat([x[s:] for x, s in zip(full, self.case.batch.starts, strict=True)])

    def run(self, block_tokens: int, topk: int | None) -> torch.Tensor:
        attention = attention_of(self.case.pool, block_tokens).begin(self.case.batch)
        attention.store_index_key(0, self.new(self.index_keys))
        selection = None
        if topk is not None and attention.needs_selection(topk):
            selection = attention.select(0, self.index_q, self.index_weights, topk)
        return attention.mla(
            0, self.q_nope, self.q_pe, self.new(self.latent), self.new(self.k_pe), self.w_uk,
            self.w_uv, 0.3, selection,
        )  # fmt: skip

    def expected(self, topk: int | None) -> torch.Tensor:
        """From the definition, in float64: per-head keys and values, a query at a time."""
        out = []
        tokens = itertools.count()
        for b, (start, length) in enumerate(
            zip(self.case.batch.starts, self.case.batch.lengths, strict=True)
        ):
            latent, k_pe = self.latent[b].double(), self.k_pe[b].double()
            k_nope = torch.einsum("lc,hnc->lhn", latent, self.w_uk.double())
            v = torch.einsum("lc,hvc->lhv", latent, self.w_uv.double())
            for position in range(start, start + length):
                t = next(tokens)
                seen = torch.arange(position + 1)
                if topk is not None and position + 1 > topk:
                    dots = self.index_q[t].double() @ self.index_keys[b][seen].double().t()
                    scores = self.index_weights[t].double() @ dots.relu()
                    seen = scores.sort(descending=True, stable=True).indices[:topk]
                scores = torch.einsum("hn,lhn->hl", self.q_nope[t].double(), k_nope[seen])
                scores = scores + self.q_pe[t].double() @ k_pe[seen].t()
                weights = (scores * 0.3).softmax(-1)
                out.append(torch.einsum("hl,lhv->hv", weights, v[seen]))
        return torch.stack(out)


@pytest.mark.parametrize("work", [MIXED, DECODES, [(0, 33)]], ids=["mixed", "decodes", "prefill"])
@pytest.mark.parametrize("topk", [None, 3, 8, 1000])
@pytest.mark.parametrize("nope", [NOPE, 0])
@pytest.mark.parametrize("block_tokens", [8192, 5, TABLES])
def test_mla(work: list[tuple[int, int]], topk: int | None, nope: int, block_tokens: int) -> None:
    torch.manual_seed(11)
    data = MlaData.random(work, nope)
    assert (data.run(block_tokens, topk) - data.expected(topk)).abs().max() < 1e-4


@pytest.mark.parametrize("work", [MIXED, DECODES, [(0, 33)]], ids=["mixed", "decodes", "prefill"])
@pytest.mark.parametrize("topk", [3, 8, 1000])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("block_tokens", [8192, 5, TABLES])
def test_selection_by_keys_in_fp8(
    work: list[tuple[int, int]], topk: int, scattered: bool, block_tokens: int
) -> None:
    torch.manual_seed(16)
    data = MlaData.random(work, NOPE, scattered, FP8)
    assert (data.run(block_tokens, topk) - data.expected(topk)).abs().max() < 1e-4


@pytest.mark.parametrize("topk", [None, 8])
def test_consecutive_pages_are_read_in_place(topk: int | None) -> None:
    torch.manual_seed(12)
    data = MlaData.random(MIXED, NOPE, scattered=False)
    assert (data.run(8192, topk) - data.expected(topk)).abs().max() < 1e-4


@pytest.mark.parametrize("topk", [None, 3, 8])
@pytest.mark.parametrize("work", [MIXED, DECODES, [(40, 30)]])
def test_any_workspace_will_do(
    topk: int | None, work: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace of a few bytes: one query, one decode at a time."""
    torch.manual_seed(13)
    monkeypatch.setitem(streamed._WORKSPACE_BYTES, "cpu", 1)
    data = MlaData.random(work, NOPE)
    assert (data.run(16, topk) - data.expected(topk)).abs().max() < 1e-4


def test_selection_breaks_ties_by_position() -> None:
    """All index keys are equal: the first topk positions win, over block borders too."""
    torch.manual_seed(14)
    data = MlaData.random([(9, 20), (25, 1)], NOPE)
    data.index_keys = [torch.ones_like(keys) for keys in data.index_keys]
    for b, start in enumerate(data.case.batch.starts):
        to = data.case.pool.destination(locs_of(data.case, b, 0, start))
        data.case.pool.store_index_key(0, to, data.index_keys[b][:start])
    for block_tokens in (8192, 7, TABLES):
        assert (data.run(block_tokens, 6) - data.expected(6)).abs().max() < 1e-4


@pytest.mark.parametrize("topk", [23, 22])
@pytest.mark.parametrize("block_tokens", [8192, TABLES])
def test_needs_selection_only_beyond_topk(topk: int, block_tokens: int) -> None:
    case = make(MLA, [(21, 1), (0, 23)])
    attention = attention_of(case.pool, block_tokens).begin(case.batch)
    assert attention.needs_selection(topk) == (topk < 23)


@pytest.mark.parametrize("work", [MIXED, DECODES, [(3, 17)]])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("block_tokens", [8192, 5, TABLES])
def test_gqa(work: list[tuple[int, int]], heads: int, block_tokens: int) -> None:
    torch.manual_seed(15)
    case = make(GQA, work)
    keys = [torch.randn(n, 2, 6) for n in case.contexts]
    values = [torch.randn(n, 2, 6) for n in case.contexts]
    q = torch.randn(len(case.batch.token_ids), heads, 6)
    for b, start in enumerate(case.batch.starts):
        to = case.pool.destination(locs_of(case, b, 0, start))
        case.pool.store_kv(0, to, keys[b][:start], values[b][:start])
    new_k = torch.cat([k[s:] for k, s in zip(keys, case.batch.starts, strict=True)])
    new_v = torch.cat([v[s:] for v, s in zip(values, case.batch.starts, strict=True)])
    attention = attention_of(case.pool, block_tokens).begin(case.batch)
    found = case.split(attention.gqa(0, q, new_k, new_v, 0.4))
    for b, (own_q, start) in enumerate(zip(case.split(q), case.batch.starts, strict=True)):
        k, v = (x[b].double().repeat_interleave(heads // 2, 1) for x in (keys, values))
        scores = torch.einsum("thd,lhd->htl", own_q.double(), k) * 0.4
        future = torch.arange(len(k)) > torch.arange(start, len(k)).unsqueeze(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        want = torch.einsum("htl,lhd->thd", weights, v)
        assert (found[b] - want).abs().max() < 1e-5


def test_errors() -> None:
    case = make(MLA, [(9, 1)])
    with pytest.raises(ValueError, match="block_tokens must be positive, got 0"):
        PagedAttention(case.pool, 0)
    narrow = ForwardBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.tensor([9]),
        out_loc=torch.tensor([5]),
        page_table=torch.ones((1, 2), dtype=torch.int64),
        starts=(9,),
        lengths=(1,),
    )
    with pytest.raises(ValueError, match=r"a context of 10 tokens needs 3 pages of 4, .* has 2"):
        PagedAttention(case.pool).begin(narrow)
