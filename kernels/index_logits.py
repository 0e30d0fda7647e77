"""Scores of the lightning indexer (DeepSeek-V3.2-Exp report, equation 1)."""

from __future__ import annotations

import torch


def index_logits(
    q: torch.Tensor,  # [T, index_n_heads, index_head_dim], scaled
    weights: torch.Tensor,  # [T, index_n_heads] float32, scaled; may be negative
    keys: torch.Tensor,  # [L, index_head_dim], or [T, L, index_head_dim]: each query its own
) -> torch.Tensor:  # [T, L] float32
    """I[t, s] = Σ_h weights[t, h] · relu(q[t, h] · k[s]), in float32."""
    num_queries, num_heads, dim = q.shape
    keys = keys.float()
    if keys.dim() == 2:
        scores = (q.float().reshape(-1, dim) @ keys.t()).view(num_queries, num_heads, -1)
    else:
        scores = torch.bmm(q.float(), keys.transpose(1, 2))
    return torch.bmm(weights.unsqueeze(1), scores.relu_()).squeeze(1)
