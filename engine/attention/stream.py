"""One prefill's attention, streamed: the context is walked in blocks of keys, the queries in slices
that keep the scores within a fixed workspace, and partial results merge by log-sum-exp.

The index stage streams the same way with a running top-k. See Dao et al., FlashAttention, section
3.1, for the merge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch
from torch.nn import functional

from engine.attention.view import Prefill
from kernels.attention import Partial, attend, causal, merge, mla_rows, values_of
from kernels.index_logits import index_logits
from kernels.topk import exact_topk

BLOCK_TOKENS: Final = 8192  # keys read at a time
WORKSPACE_BYTES: Final = 16 << 20  # of scores or gathered rows, at a time
_SLICE_QUERIES: Final = 128  # small enough that causal work above the diagonal is skipped
# Beyond this many times topk, reading only the chosen rows beats masking all the scores.
_GATHER_RATIO: Final = 4

Rows: TypeAlias = torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class MlaQueries:
    """Queries of T tokens, the two halves of kv_b_proj, and the softmax scale."""

    q_nope: torch.Tensor  # [T, num_heads, qk_nope_head_dim], may be 0 wide
    q_pe: torch.Tensor  # [T, num_heads, qk_rope_head_dim]
    w_uk: torch.Tensor  # [num_heads, qk_nope_head_dim, kv_lora_rank]
    w_uv: torch.Tensor  # [num_heads, v_head_dim, kv_lora_rank]
    scale: float

    @property
    def latent_dim(self) -> int:
        return self.w_uv.shape[2]

    def slice(self, begin: int, end: int) -> MlaQueries:
        return replace(self, q_nope=self.q_nope[begin:end], q_pe=self.q_pe[begin:end])

    def pick(self, tokens: torch.Tensor) -> MlaQueries:
        return replace(self, q_nope=self.q_nope[tokens], q_pe=self.q_pe[tokens])

    def absorbed(self) -> torch.Tensor:
        """Queries against cache rows: [T, H, latent + rope]; [T, H, rope] where nope is 0 wide, as
        the latent then has no part in the score."""
        if self.q_nope.shape[-1] == 0:
            return self.q_pe
        by_head = self.q_nope.transpose(0, 1)
        q_latent = torch.bmm(by_head, self.w_uk.to(by_head.dtype)).transpose(0, 1)
        return torch.cat((q_latent, self.q_pe), dim=-1)

    def expanding_is_cheaper(self, context: int) -> bool:
        """Whether per-head keys and values cost fewer multiplications than the absorbed form."""
        num_queries, num_heads, rope = self.q_pe.shape
        nope, v_dim, latent = self.w_uk.shape[1], self.w_uv.shape[1], self.latent_dim
        expand = context * latent * (nope + v_dim)
        absorb = num_queries * latent * (nope + v_dim)
        pairs = num_queries * context
        score = latent + rope if nope else rope
        expanded = expand + pairs * (nope + rope + v_dim)
        return num_heads * expanded < num_heads * (absorb + pairs * (score + latent))


def stream_mla(
    queries: MlaQueries,
    prefill: Prefill,
    cache: torch.Tensor,  # [rows, kv_lora_rank + qk_rope_head_dim]
    positions: torch.Tensor | None,  # [num_queries, K]: see TopK; None: dense
    block_tokens: int,
) -> torch.Tensor:  # [num_queries, num_heads, v_head_dim]
    if positions is not None and prefill.context > _GATHER_RATIO * positions.shape[1]:
        return _gather_mla(queries, prefill, cache, positions)
    expand = queries.expanding_is_cheaper(prefill.context)
    num_queries, num_heads, _ = queries.q_pe.shape
    if expand:  # one group a head
        q = torch.cat((queries.q_nope, queries.q_pe), dim=-1).transpose(0, 1)
    else:  # one group: all heads read the same latent row
        q = queries.absorbed().unsqueeze(0).flatten(1, 2)

    def read(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        own = cache[rows]
        if expand:
            return _expand(queries, own)
        return own[:, -q.shape[-1] :].unsqueeze(0), own[:, : queries.latent_dim].unsqueeze(0)

    heads = 1 if expand else num_heads
    out = _stream(q, heads, prefill, positions, block_tokens, queries.scale, read)
    if expand:
        return out.transpose(0, 1)  # [H, T, V] -> [T, H, V]
    return values_of(out.view(num_queries, num_heads, -1), queries.w_uv)


def _expand(queries: MlaQueries, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache rows [L, D] -> keys [H, L, nope + rope] and values [H, L, v_head_dim]."""
    num_heads = queries.w_uv.shape[0]
    latent, k_pe = rows[:, : queries.latent_dim], rows[:, queries.latent_dim :]
    wide = queries.q_pe.dtype
    shared = k_pe.to(wide).expand(num_heads, -1, -1)
    latent = latent.to(wide).expand(num_heads, -1, -1)
    v = torch.bmm(latent, queries.w_uv.to(wide).transpose(1, 2))
    if queries.q_nope.shape[-1] == 0:
        return shared, v
    k_nope = torch.bmm(latent, queries.w_uk.to(wide).transpose(1, 2))
    return torch.cat((k_nope, shared), dim=-1), v


def _gather_mla(
    queries: MlaQueries, prefill: Prefill, cache: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Sparse attention that reads only the chosen rows, a few queries at a time."""
    counts = (positions >= 0).sum(-1)
    at = positions.clamp_min(0)
    rows = prefill.rows.start + at if isinstance(prefill.rows, slice) else prefill.rows[at]
    step = max(1, WORKSPACE_BYTES // (positions.shape[1] * cache.shape[1] * 4))
    q = queries.absorbed()
    parts = []
    for a in range(0, len(q), step):
        b = a + step
        parts.append(mla_rows(q[a:b], cache, rows[a:b], counts[a:b], queries.w_uv, queries.scale))
    return torch.cat(parts)


def stream_gqa(
    q: torch.Tensor,  # [num_queries, num_heads, head_dim]
    prefill: Prefill,
    keys: torch.Tensor,  # [rows, num_kv_heads, head_dim]
    values: torch.Tensor,  # [rows, num_kv_heads, head_dim]
    scale: float,
    block_tokens: int,
) -> torch.Tensor:  # [num_queries, num_heads, head_dim]
    num_queries, num_heads, dim = q.shape
    num_kv = keys.shape[1]
    group = num_heads // num_kv

    def read(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        return keys[rows].transpose(0, 1), values[rows].transpose(0, 1)

    # [num_kv_heads, num_queries · group, head_dim]: one group of queries shares a kv head
    grouped = q.view(num_queries, num_kv, group, dim).transpose(0, 1).flatten(1, 2)
    out = _stream(grouped, group, prefill, None, block_tokens, scale, read)
    return out.view(num_kv, num_queries, group, dim).transpose(0, 1).flatten(1, 2)


def select_topk(
    q: torch.Tensor,  # [num_queries, index_n_heads, index_head_dim]
    weights: torch.Tensor,  # [num_queries, index_n_heads]
    keys: torch.Tensor,  # [rows, index_head_dim]
    prefill: Prefill,
    topk: int,
    block_tokens: int,
) -> torch.Tensor:
    """int64 [num_queries, topk]: positions of each query's choice, ascending, -1 behind them."""
    num_queries, num_heads, _ = q.shape
    width = min(block_tokens, prefill.context)
    step = _step(num_heads * width)
    best: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * -(-num_queries // step)
    for begin in range(0, prefill.context, block_tokens):
        block = keys[_span(prefill, begin, begin + block_tokens)]
        for i, a in enumerate(range(0, num_queries, step)):
            b = min(a + step, num_queries)
            visible = min(begin + len(block), prefill.start + b) - begin
            if visible <= 0:
                continue
            scores = index_logits(q[a:b], weights[a:b], block[:visible])
            mask = _causal_tail(prefill, a, b, begin, visible, q.device)
            if mask is not None:
                scores[:, visible - mask.shape[1] :].masked_fill_(~mask, -torch.inf)
            best[i] = _better(best[i], scores, begin, topk)
    chosen = [functional.pad(p, (0, topk - p.shape[1]), value=-1) for _, p in filter(None, best)]
    return torch.cat(chosen)


def _better(
    best: tuple[torch.Tensor, torch.Tensor] | None, scores: torch.Tensor, begin: int, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running top-k: (scores, positions) of the best so far and of this block's columns. Both are
    in ascending position, so that the earlier of two equal scores is kept."""
    positions = torch.arange(begin, begin + scores.shape[1], device=scores.device)
    positions = positions.expand_as(scores)
    if best is not None:
        scores = torch.cat((best[0], scores), dim=1)
        positions = torch.cat((best[1], positions), dim=1)
    columns = exact_topk(scores, topk)
    absent, columns = columns < 0, columns.clamp_min(0)
    return (
        scores.gather(1, columns).masked_fill_(absent, -torch.inf),
        positions.gather(1, columns).masked_fill_(absent, -1),
    )


def _stream(
    q: torch.Tensor,  # [G, num_queries · heads, D], query-major
    heads: int,
    prefill: Prefill,
    positions: torch.Tensor | None,  # [num_queries, K]: the chosen; None: all
    block_tokens: int,
    scale: float,
    read: Callable[[Rows], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:  # [G, num_queries · heads, V] float32
    """Attention over the whole context; `read` gives k [G, L, D] and v [G, L, V] of some rows."""
    num_queries = q.shape[1] // heads
    step = _step(q.shape[0] * heads * min(block_tokens, prefill.context))
    parts: list[Partial | None] = [None] * -(-num_queries // step)
    for begin in range(0, prefill.context, block_tokens):
        k, v = read(_span(prefill, begin, begin + block_tokens))
        for i, a in enumerate(range(0, num_queries, step)):
            b = min(a + step, num_queries)
            visible = min(begin + k.shape[1], prefill.start + b) - begin
            if visible <= 0:
                continue
            mask = (
                _causal_tail(prefill, a, b, begin, visible, q.device)
                if positions is None
                else _chosen(positions[a:b], begin, visible)
            )
            own = q[:, a * heads : b * heads]
            parts[i] = merge(parts[i], attend(own, k[:, :visible], v[:, :visible], mask, scale))
    return torch.cat([part.out for part in parts if part is not None], dim=1)


def _step(scores_per_query: int) -> int:
    """Queries of a slice, so that its float32 scores stay within the workspace."""
    return min(_SLICE_QUERIES, max(1, WORKSPACE_BYTES // (4 * scores_per_query)))


def _span(prefill: Prefill, begin: int, end: int) -> Rows:
    """The rows of positions [begin, min(end, context))."""
    end = min(end, prefill.context)
    if isinstance(prefill.rows, slice):
        return slice(prefill.rows.start + begin, prefill.rows.start + end)
    return prefill.rows[begin:end]


def _causal_tail(
    prefill: Prefill, a: int, b: int, begin: int, visible: int, device: torch.device
) -> torch.Tensor | None:
    """Causal mask of the queries [a, b) for the last keys of [begin, begin + visible): those that
    not all of the queries may see. None: there are none."""
    seen = prefill.start + a  # the position of query a: every query of the slice sees up to it
    first = max(begin, seen + 1)
    width = begin + visible - first
    return causal(b - a, width, seen - first, device) if width > 0 else None


def _chosen(positions: torch.Tensor, begin: int, visible: int) -> torch.Tensor:
    """bool [num_queries, visible]: which keys of [begin, begin + visible) are chosen. Only tokens
    that a query may see are ever chosen, so no causal mask is needed."""
    columns = positions - begin
    columns = torch.where((columns < 0) | (columns >= visible), visible, columns)
    mask = torch.zeros((len(positions), visible + 1), dtype=torch.bool, device=positions.device)
    return mask.scatter_(1, columns, True)[:, :visible]
