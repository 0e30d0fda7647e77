"""Attention over a pool that holds every row on this rank: the reference and the CPU back end.

Decodes of a batch are computed together; each prefill streams over its context in blocks, so that
the workspace grows with neither the context nor the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from engine.attention.base import Selection
from engine.attention.mla import MlaQueries
from engine.attention.stream import BLOCK_TOKENS, select_topk, stream_gqa, stream_mla
from engine.attention.view import BatchView, Decodes, view_batch
from engine.batch import ForwardBatch
from kernels.attention import gqa_rows, mla_rows
from kernels.fp8_keys import IndexKeys
from kernels.index_logits import index_logits_rows
from kernels.streamed import workspace_bytes
from kernels.topk import exact_topk
from kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class TopK:
    """What `select` found: rows for the decodes, positions for each prefill."""

    decode_rows: torch.Tensor | None  # [N, K] int64; None: the batch has no decodes
    decode_counts: torch.Tensor | None  # [N] int64: how many of them were chosen
    # By Prefill.begin: int64 [num_queries, topk], ascending, -1 behind the chosen. A prefill that
    # is not there has no more than topk tokens: all of them are chosen.
    prefill_positions: dict[int, torch.Tensor] = field(default_factory=dict)


class PagedAttention:
    """Makes one Attention (engine/attention/base.py) for each forward."""

    def __init__(self, pool: KVPool, block_tokens: int = BLOCK_TOKENS) -> None:
        if block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, got {block_tokens}")
        self._pool = pool
        self._block_tokens = block_tokens

    workspace_bytes = 0  # the pool is read in place

    def begin(self, batch: ForwardBatch, share: object = None) -> PagedForward:
        """`share` is not looked at: one rank computes the whole batch."""
        return PagedForward(self._pool, view_batch(batch, self._pool), self._block_tokens)


class PagedForward:
    """One forward's attention; see engine.attention.base.Attention for the contract."""

    def __init__(self, pool: KVPool, view: BatchView, block_tokens: int) -> None:
        self._pool = pool
        self._view = view
        self._block_tokens = block_tokens

    def gqa(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        pool, view = self._pool, self._view
        pool.store_kv(layer, view.destination, k, v)
        keys, values = pool.keys(layer), pool.values(layer)
        decoded = None
        if (decodes := view.decodes) is not None:
            own, width = decodes.pick(q), 2 * keys[0].nbytes
            decoded = _cat(
                [
                    gqa_rows(own[a:b], keys, values, rows, counts, scale)
                    for a, b, rows, counts in _slices(decodes, decodes.rows, decodes.counts, width)
                ]
            )
        prefilled = [
            stream_gqa(q[p.begin : p.end], p, keys, values, scale, self._block_tokens)
            for p in view.prefills
        ]
        return self._join(decoded, prefilled).to(q.dtype)

    def store_index_key(self, layer: int, key: torch.Tensor) -> None:
        self._pool.store_index_key(layer, self._view.destination, key)

    def needs_selection(self, topk: int) -> bool:
        return self._view.max_context > topk

    def select(self, layer: int, q: torch.Tensor, weights: torch.Tensor, topk: int) -> TopK:
        keys = self._pool.index_keys(layer)
        rows = counts = None
        if (decodes := self._view.decodes) is not None:
            rows, counts = decodes.rows, decodes.counts
            if max(decodes.contexts) > topk:
                positions = self._select_decodes(decodes, q, weights, keys, topk)
                rows = rows.gather(1, positions.clamp_min(0))
                counts = counts.clamp_max(topk)
        chosen = {
            p.begin: select_topk(
                q[p.begin : p.end], weights[p.begin : p.end], keys, p, topk, self._block_tokens
            )
            for p in self._view.prefills
            if p.context > topk
        }
        return TopK(rows, counts, chosen)

    def _select_decodes(
        self,
        decodes: Decodes,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: IndexKeys,
        topk: int,
    ) -> torch.Tensor:
        """int64 [N, topk] positions, ascending, -1 behind the chosen."""
        own_q, own_weights = decodes.pick(q), decodes.pick(weights)
        width = q.shape[2] * torch.float32.itemsize  # as which keys are multiplied
        parts = []
        for a, b, rows, counts in _slices(decodes, decodes.rows, decodes.counts, width):
            scores = index_logits_rows(own_q[a:b], own_weights[a:b], keys, rows, counts)
            positions = exact_topk(scores, topk)
            parts.append(functional.pad(positions, (0, topk - positions.shape[1]), value=-1))
        return _cat(parts)

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
        self._pool.store_latent(layer, self._view.destination, latent, k_pe)
        cache = self._pool.latent(layer)
        chosen = selection if isinstance(selection, TopK) else None
        queries = MlaQueries(q_nope, q_pe, w_uk, w_uv, scale)
        decoded = None
        if (decodes := self._view.decodes) is not None:
            decoded = self._decode_mla(decodes, queries, cache, chosen)
        positions = chosen.prefill_positions if chosen is not None else {}
        prefilled = [
            stream_mla(
                queries.slice(p.begin, p.end), p, cache, positions.get(p.begin), self._block_tokens
            )
            for p in self._view.prefills
        ]
        return self._join(decoded, prefilled).to(q_pe.dtype)

    def _decode_mla(
        self, decodes: Decodes, queries: MlaQueries, cache: torch.Tensor, chosen: TopK | None
    ) -> torch.Tensor:
        rows, counts = decodes.rows, decodes.counts
        if chosen is not None and chosen.decode_rows is not None:
            assert chosen.decode_counts is not None
            rows, counts = chosen.decode_rows, chosen.decode_counts
        own = queries if decodes.tokens is None else queries.pick(decodes.tokens)
        q = own.absorbed()
        return _cat(
            [
                mla_rows(q[a:b], cache, part, part_counts, own.w_uv, own.scale)
                for a, b, part, part_counts in _slices(decodes, rows, counts, cache[0].nbytes)
            ]
        )

    def _join(
        self, decoded: torch.Tensor | None, prefilled: list[torch.Tensor]
    ) -> torch.Tensor:  # [T, ...] in the batch's order
        decodes, prefills = self._view.decodes, self._view.prefills
        if decoded is None or decodes is None:
            return _cat(prefilled)
        if decodes.tokens is None:
            return decoded
        num_tokens = len(decoded) + sum(len(part) for part in prefilled)
        out = decoded.new_empty((num_tokens, *decoded.shape[1:]))
        out[decodes.tokens] = decoded
        for p, part in zip(prefills, prefilled, strict=True):
            out[p.begin : p.end] = part
        return out


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _slices(
    decodes: Decodes, rows: torch.Tensor, counts: torch.Tensor, row_bytes: int
) -> list[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """(a, b, rows, counts) of the decodes [a, b): as many at once as the workspace takes, each
    slice no wider than its own longest context."""
    num, width = rows.shape
    step = max(1, workspace_bytes(rows.device) // (width * row_bytes))
    if step >= num:
        return [(0, num, rows, counts)]
    out = []
    for a in range(0, num, step):
        b = min(a + step, num)
        own = min(width, max(decodes.contexts[a:b]))
        out.append((a, b, rows[a:b, :own].contiguous(), counts[a:b]))
    return out
