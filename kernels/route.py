"""Which experts a token goes to, and with what weights: the gates of DeepSeek-V2 and V3."""

from __future__ import annotations

import torch


def sigmoid_gate(
    logits: torch.Tensor,  # [T, num_experts] float32
    bias: torch.Tensor,  # [num_experts] float32: steers the choice, not the weights
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:  # ids [T, top_k] int64, weights [T, top_k] float32
    """DeepSeek-V3 (report, section 2.1.2): a group's score is the sum of its two best choices; the
    experts of the topk_group best groups compete. Weights are the raw sigmoids of the chosen."""
    scores = logits.sigmoid()
    choice = scores + bias
    if n_group > 1:
        grouped = choice.view(len(choice), n_group, -1)
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        choice = _keep_groups(choice, group_scores, topk_group, -torch.inf)
    ids = choice.topk(top_k, dim=-1).indices
    return ids, scores.gather(1, ids)


def softmax_gate(
    logits: torch.Tensor,  # [T, num_experts] float32
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:  # ids [T, top_k] int64, weights [T, top_k] float32
    """DeepSeek-V2 (report, section 2.2.2): a group's score is its best expert's; n_group 1 is the
    greedy choice."""
    scores = logits.softmax(dim=-1)
    if n_group > 1:
        group_scores = scores.view(len(scores), n_group, -1).amax(-1)
        scores = _keep_groups(scores, group_scores, topk_group, 0.0)
    weights, ids = scores.topk(top_k, dim=-1)
    return ids, weights


def _keep_groups(
    scores: torch.Tensor, group_scores: torch.Tensor, topk_group: int, other: float
) -> torch.Tensor:
    """scores [T, E] with the experts outside the best topk_group groups set to `other`."""
    kept = group_scores.topk(topk_group, dim=-1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    per_group = scores.shape[1] // group_scores.shape[1]
    return scores.masked_fill(outside.repeat_interleave(per_group, dim=1), other)
