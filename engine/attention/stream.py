"""One prefill's attention where this rank holds the whole context: it is walked in blocks of keys,
so that the workspace grows with neither the context nor the chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import torch

from engine.attention.mla import MlaQueries, MlaRun, reads_chosen
from engine.attention.running import CausalRun, Positions, RunningTopK
from engine.attention.view import Prefill
from kernels.attention import mla_rows
from kernels.fp8_keys import IndexKeys
from kernels.streamed import workspace_bytes

BLOCK_TOKENS: Final = 8192  # keys read at a time
Rows: TypeAlias = torch.Tensor | slice


def stream_mla(
    queries: MlaQueries,
    prefill: Prefill,
    cache: torch.Tensor,  # [rows, kv_lora_rank + qk_rope_head_dim]
    chosen: torch.Tensor | None,  # int64 [num_queries, K]: see RunningTopK; None: dense
    block_tokens: int,
) -> torch.Tensor:  # [num_queries, num_heads, v_head_dim]
    if chosen is not None and reads_chosen(chosen, prefill.context):
        return _gather_mla(queries, prefill, cache, chosen)
    run = MlaRun(queries, _positions(prefill), chosen, min(block_tokens, prefill.context))
    for begin, rows in _spans(prefill, block_tokens):
        run.add(cache[rows], begin)
    return run.finish()


def _gather_mla(
    queries: MlaQueries, prefill: Prefill, cache: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Sparse attention that reads only the chosen rows, a few queries at a time."""
    counts = (chosen >= 0).sum(-1)
    at = chosen.clamp_min(0)
    rows = prefill.rows.start + at if isinstance(prefill.rows, slice) else prefill.rows[at]
    step = max(1, workspace_bytes(cache.device) // (chosen.shape[1] * cache.shape[1] * 4))
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
    run = CausalRun(q, _positions(prefill), scale)
    for begin, rows in _spans(prefill, block_tokens):
        run.add(keys[rows], values[rows], begin)
    return run.finish()


def select_topk(
    q: torch.Tensor,  # [num_queries, index_n_heads, index_head_dim]
    weights: torch.Tensor,  # [num_queries, index_n_heads]
    keys: IndexKeys,  # [rows, index_head_dim]
    prefill: Prefill,
    topk: int,
    block_tokens: int,
) -> torch.Tensor:
    """int64 [num_queries, topk]: positions of each query's choice, ascending, -1 behind them."""
    most_keys = min(block_tokens, prefill.context)
    running = RunningTopK(q, weights, _positions(prefill), topk, most_keys)
    for begin, rows in _spans(prefill, block_tokens):
        running.add(keys[rows], begin)
    return running.finish()


def _positions(prefill: Prefill) -> Positions:
    return Positions(prefill.start, prefill.end - prefill.begin)


def _spans(prefill: Prefill, block_tokens: int) -> Iterator[tuple[int, Rows]]:
    """(position of the first, rows) of each block of the context."""
    for begin in range(0, prefill.context, block_tokens):
        end = min(begin + block_tokens, prefill.context)
        if isinstance(prefill.rows, slice):
            yield begin, slice(prefill.rows.start + begin, prefill.rows.start + end)
        else:
            yield begin, prefill.rows[begin:end]
