"""Scores of the lightning indexer (DeepSeek-V3.2-Exp report, equation 1)."""

from __future__ import annotations

import torch

from kernels.dispatch import cpu_kernels
from kernels.fp8_keys import Fp8Keys, IndexKeys, quantise_queries


def index_logits(
    q: torch.Tensor,  # [T, index_n_heads, index_head_dim], scaled
    weights: torch.Tensor,  # [T, index_n_heads] float32, scaled; may be negative
    keys: IndexKeys,  # [L, index_head_dim]
) -> torch.Tensor:  # [T, L] float32
    """I[t, s] = Σ_h weights[t, h] · relu(q[t, h] · k[s]), in float32. Keys in fp8 are met by
    queries quantised alike."""
    if isinstance(keys, Fp8Keys):
        q, weights = quantise_queries(q, weights)
        keys = keys.dequantised()
    num_queries, num_heads, dim = q.shape
    scores = q.float().reshape(-1, dim) @ keys.float().t()
    return _weigh(weights, scores.view(num_queries, num_heads, -1))


def index_logits_rows(
    q: torch.Tensor,  # [N, index_n_heads, index_head_dim], scaled
    weights: torch.Tensor,  # [N, index_n_heads] float32, scaled
    keys: IndexKeys,  # [rows, index_head_dim]
    rows: torch.Tensor,  # [N, K] int64, all of them written rows
    counts: torch.Tensor,  # [N] int64, 1 .. K: query n scores rows[n, : counts[n]]
) -> torch.Tensor:  # [N, K] float32, -inf from counts[n] on
    """The same where each query has its own keys."""
    if isinstance(keys, Fp8Keys):
        q, weights = quantise_queries(q, weights)
        own = keys[rows.flatten()].dequantised().view(*rows.shape, -1)
        return _of_rows(q, weights, own, counts)
    if cpu_kernels(q, keys) is not None and q.dtype == keys.dtype == torch.float32:
        from kernels.cpu import attention

        return attention.index_logits(q, weights, keys, rows, counts)
    return _of_rows(q, weights, keys[rows], counts)


def _of_rows(
    q: torch.Tensor, weights: torch.Tensor, own: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """own [N, K, index_head_dim] -> [N, K]"""
    scores = torch.bmm(q.float(), own.float().transpose(1, 2))
    columns = torch.arange(own.shape[1], device=own.device)
    return _weigh(weights, scores).masked_fill_(columns >= counts.unsqueeze(1), -torch.inf)


def _weigh(weights: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """weights [T, H], scores [T, H, L] -> Σ_h weights · relu(scores), [T, L]"""
    return torch.bmm(weights.unsqueeze(1), scores.relu_()).squeeze(1)
