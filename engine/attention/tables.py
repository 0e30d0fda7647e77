"""Attention straight from page tables, where the device has kernels for it: nothing is gathered
that is not read, no request is handled on its own but a prefill, and nothing waits for the device.

The requests with one new token at the front of the batch are its decodes, computed together; each
of the others is computed alone. All that a decode needs is on the device (its context is its
position and itself), so that a graph recorded for one batch serves every other of its size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from engine.attention.base import Selection
from engine.attention.mla import MlaQueries
from engine.batch import ForwardBatch
from kernels import index_topk
from kernels.attention import gqa_causal, gqa_paged, mla_causal, mla_paged, mla_rows
from kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class Decodes:
    """The first N requests and tokens of the batch."""

    num: int
    pages: torch.Tensor  # [N, P] int32 row pages; padding behind a request's last
    counts: torch.Tensor  # [N] int32, tokens of each context


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request with batch tokens [begin, end), at positions start + i."""

    begin: int
    end: int
    start: int
    pages: torch.Tensor  # [P] int32 row pages

    @property
    def context(self) -> int:
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True)
class Chosen:
    """Cache rows that the queries of one part of the batch read: rows[i, : counts[i]]."""

    rows: torch.Tensor  # [num_queries, topk] int32
    counts: torch.Tensor  # [num_queries] int32


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """What `select` found. A prefill that is not there, by its `begin`, reads its whole context."""

    decodes: Chosen | None
    prefills: dict[int, Chosen] = field(default_factory=dict)


class TableAttention:
    """Makes one Attention (engine/attention/base.py) for each forward."""

    workspace_bytes: Final = 0  # the pool is read in place

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def begin(self, batch: ForwardBatch, share: object = None) -> TableForward:
        """`share` is not looked at: one rank computes the whole batch."""
        return TableForward(self._pool, batch)


class TableForward:
    """One forward's attention; see engine.attention.base.Attention for the contract."""

    def __init__(self, pool: KVPool, batch: ForwardBatch) -> None:
        self._pool = pool
        self._destination = pool.destination(batch.out_loc)
        self._max_context = max(s + n for s, n in zip(batch.starts, batch.lengths, strict=True))
        pages = pool.row_pages(batch.page_table)
        num = next((b for b, n in enumerate(batch.lengths) if n > 1), len(batch.lengths))
        self._decodes: Decodes | None = None
        if num:
            counts = (batch.positions[:num] + 1).to(torch.int32)
            self._decodes = Decodes(num, pages[:num], counts)
        self._prefills: list[Prefill] = []
        begin = num
        for b in range(num, len(batch.lengths)):
            end = begin + batch.lengths[b]
            self._prefills.append(Prefill(begin, end, batch.starts[b], pages[b]))
            begin = end

    def gqa(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        pool = self._pool
        pool.store_kv(layer, self._destination, k, v)
        keys, values, page_size = pool.keys(layer), pool.values(layer), pool.page_size
        parts = []
        if (d := self._decodes) is not None:
            own = q[: d.num]
            parts.append(gqa_paged(own, keys, values, d.pages, d.counts, page_size, scale))
        for p in self._prefills:
            own = q[p.begin : p.end]
            parts.append(gqa_causal(own, keys, values, p.pages, p.start, page_size, scale))
        return _cat(parts)

    def store_index_key(self, layer: int, key: torch.Tensor) -> None:
        self._pool.store_index_key(layer, self._destination, key)

    def needs_selection(self, topk: int) -> bool:
        return self._max_context > topk

    def select(self, layer: int, q: torch.Tensor, weights: torch.Tensor, topk: int) -> ChosenRows:
        keys, page_size = self._pool.index_keys(layer), self._pool.page_size
        decodes = None
        if (d := self._decodes) is not None:
            own = slice(0, d.num)
            positions, counts = index_topk.paged(
                q[own], weights[own], keys, d.pages, d.counts, page_size, topk
            )
            decodes = Chosen(index_topk.rows_of(d.pages, positions, page_size), counts)
        prefills = {}
        for p in self._prefills:
            if p.context > topk:
                own = slice(p.begin, p.end)
                positions = index_topk.causal(
                    q[own], weights[own], keys, p.pages, p.start, page_size, topk
                )
                prefills[p.begin] = Chosen(
                    index_topk.rows_of(p.pages, positions, page_size),
                    _visible(p, topk, q.device),
                )
        return ChosenRows(decodes, prefills)

    def mla(
        self,
        layer: int,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        latent: torch.Tensor,
        k_pe: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        scale: float,
        selection: Selection | None,
    ) -> torch.Tensor:
        pool = self._pool
        pool.store_latent(layer, self._destination, latent, k_pe)
        cache, page_size = pool.latent(layer), pool.page_size
        queries = MlaQueries(q_nope, q_pe, w_uk, w_uv, scale)
        chosen = selection if isinstance(selection, ChosenRows) else None
        parts = []
        if (d := self._decodes) is not None:
            q = queries.slice(0, d.num).absorbed()
            if chosen is not None and chosen.decodes is not None:
                parts.append(_mla_rows(q, cache, chosen.decodes, w_uv, scale))
            else:
                parts.append(mla_paged(q, cache, d.pages, d.counts, page_size, w_uv, scale))
        for p in self._prefills:
            own = queries.slice(p.begin, p.end)
            if chosen is not None and p.begin in chosen.prefills:
                read = chosen.prefills[p.begin]
                parts.append(_mla_rows(own.absorbed(), cache, read, w_uv, scale))
            else:
                parts.append(
                    mla_causal(
                        own.q_nope, own.q_pe, cache, p.pages, p.start, page_size, w_uk, w_uv, scale
                    )
                )
        return _cat(parts)


def _mla_rows(
    q: torch.Tensor, cache: torch.Tensor, read: Chosen, w_uv: torch.Tensor, scale: float
) -> torch.Tensor:
    return mla_rows(q, cache, read.rows, read.counts, w_uv, scale)


def _visible(p: Prefill, topk: int, device: torch.device) -> torch.Tensor:
    """[num] int32: how many tokens each query of a prefill chooses, all that it sees at most."""
    ends = torch.arange(p.start + 1, p.context + 1, dtype=torch.int32, device=device)
    return ends.clamp_max_(topk)


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
