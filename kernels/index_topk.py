"""Which tokens each query of the lightning indexer chooses, straight from paged index keys: scores
(kernels.index_logits) and the exact top-k (kernels.topk) in one call.

Chosen are the topk best by score descending, then position ascending, among the tokens a query may
see; all of them where they are no more than topk. Knows no request and no cache: pages are row
pages, page p being the rows p · page_size, p · page_size + 1, ...
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from kernels.dispatch import fall_back, gpu_kernels
from kernels.fp8_keys import Fp8Keys, IndexKeys
from kernels.index_logits import index_logits, index_logits_rows
from kernels.topk import MOST_ON_GPU, exact_topk

_WORKSPACE_BYTES: Final = 256 << 20  # of float32 scores at a time
_MOST_HEADS: Final = 128  # whose queries fit a multiprocessor
_MOST_DIM: Final = 256


def causal(
    q: torch.Tensor,  # [M, index_n_heads, index_head_dim], scaled
    weights: torch.Tensor,  # [M, index_n_heads] float32, scaled
    keys: IndexKeys,  # [rows, index_head_dim]
    pages: torch.Tensor,  # [P] int32 row pages of the context, in order
    start: int,
    page_size: int,
    topk: int,
) -> torch.Tensor:  # [M, topk] int32 positions, ascending, -1 behind them
    """The choice of one request's queries at positions start, start + 1, ...; each sees the tokens
    up to its own. Raises ValueError where the pages do not hold all of them."""
    num_queries, num_heads = q.shape[:2]
    context = start + num_queries
    if context > len(pages) * page_size:
        raise ValueError(
            f"{num_queries} queries from position {start} on need {context} tokens, "
            f"{len(pages)} pages of {page_size} hold {len(pages) * page_size}"
        )
    if _on_gpu(q, keys, weights, pages, topk):
        from kernels.gpu import index_topk as gpu

        return gpu.causal(q, weights, keys, pages, start, page_size, topk)
    own = keys[rows_of(pages, torch.arange(context, device=q.device), page_size).long()]
    positions = torch.arange(start, context, device=q.device)
    step = max(1, _WORKSPACE_BYTES // (4 * num_heads * context))
    parts = []
    for a in range(0, num_queries, step):
        b = min(a + step, num_queries)
        visible = start + b
        scores = index_logits(q[a:b], weights[a:b], own[:visible])
        hidden = torch.arange(visible, device=q.device) > positions[a:b, None]
        parts.append(_padded(exact_topk(scores.masked_fill_(hidden, -torch.inf), topk), topk))
    return torch.cat(parts)


def paged(
    q: torch.Tensor,  # [N, index_n_heads, index_head_dim], scaled
    weights: torch.Tensor,  # [N, index_n_heads] float32, scaled
    keys: IndexKeys,  # [rows, index_head_dim]
    pages: torch.Tensor,  # [N, P] int32 row pages; beyond a context they may name any page
    counts: torch.Tensor,  # [N] int32 or int64, 0 .. P · page_size: tokens that query n sees
    page_size: int,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # as for `causal` [N, topk]; how many [N], as counts
    """The choice of one query of each of N requests."""
    if _on_gpu(q, keys, weights, pages, topk):
        from kernels.gpu import index_topk as gpu

        return gpu.paged(q, weights, keys, pages, counts, page_size, topk)
    num, num_heads = q.shape[:2]
    width = pages.shape[1] * page_size
    columns = torch.arange(width, device=q.device)
    # What lies beyond a context was perhaps never written: its first row stands in for it.
    inside = torch.where(columns < counts.unsqueeze(1), columns, 0)
    rows = rows_of(pages, inside, page_size).long()
    step = max(1, _WORKSPACE_BYTES // (4 * width * max(num_heads, q.shape[2])))
    parts = []
    for a in range(0, num, step):
        some = slice(a, a + step)
        own_counts = counts[some].long()
        at_least_one = own_counts.clamp_min(1)
        scores = index_logits_rows(q[some], weights[some], keys, rows[some], at_least_one)
        scores = scores.masked_fill_(columns >= own_counts.unsqueeze(1), -torch.inf)
        parts.append(_padded(exact_topk(scores, topk), topk))
    return torch.cat(parts), counts.clamp_max(topk)


def rows_of(
    pages: torch.Tensor,  # [P] or [N, P] int32 row pages
    positions: torch.Tensor,  # [K] or [N, K], below P · page_size; negative: none
    page_size: int,
) -> torch.Tensor:  # int32, shaped like positions
    """The cache row of each position. Where there is none it is the row of position 0, which any
    context that is not empty has written."""
    if gpu_kernels(pages, positions):
        from kernels.gpu import index_topk as gpu

        return gpu.rows_of(pages, positions, page_size)
    at = positions.long().clamp_min(0)
    page = at // page_size
    held = pages.gather(1, page) if pages.dim() == 2 else pages[page]
    return held.int() * page_size + (at % page_size).int()


def _on_gpu(
    q: torch.Tensor,
    keys: IndexKeys,
    weights: torch.Tensor,
    pages: torch.Tensor,
    topk: int,
) -> bool:
    stored = keys.pages if isinstance(keys, Fp8Keys) else keys
    if not gpu_kernels(q, stored, weights, pages):
        return False
    heads, dim = q.shape[1:]
    is_one_dtype = isinstance(keys, Fp8Keys) or q.dtype == stored.dtype
    if heads > _MOST_HEADS or dim > _MOST_DIM or topk > MOST_ON_GPU or not is_one_dtype:
        fall_back(
            "index top-k",
            f"it has {heads} heads of {dim} in {q.dtype}, keys in {stored.dtype} and topk {topk}; "
            f"at most {_MOST_HEADS} heads of {_MOST_DIM}, one dtype and topk {MOST_ON_GPU} fit",
        )
        return False
    return q.stride(2) == stored.stride(1) == weights.stride(1) == 1


def _padded(positions: torch.Tensor, topk: int) -> torch.Tensor:
    return functional.pad(positions, (0, topk - positions.shape[1]), value=-1).int()
