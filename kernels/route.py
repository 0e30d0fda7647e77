"""Which experts a token goes to, and with what weights: the gates of DeepSeek-V2 and V3."""

from __future__ import annotations

import torch

from kernels.dispatch import cpu_kernels, gpu_kernels


def sigmoid_gate(
    logits: torch.Tensor,  # [T, num_experts] float32
    bias: torch.Tensor,  # [num_experts] float32: steers the choice, not the weights
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    *,
    normalise: bool = False,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # ids [T, top_k] int64, weights [T, top_k] float32
    """DeepSeek-V3 (report, section 2.1.2): a group's score is the sum of its two best choices; the
    experts of the topk_group best groups compete. Weights are the sigmoids of the chosen, divided
    by their sum where `normalise`, times `factor`."""
    if n_group == 1 and top_k <= logits.shape[1] and cpu_kernels(logits, bias) is not None:
        from kernels.cpu import route as cpu

        return cpu.sigmoid_gate(logits.contiguous(), bias.contiguous(), top_k, normalise, factor)
    if gpu_kernels(logits, bias):
        from kernels.gpu import route as gpu

        return gpu.gate(logits, bias, top_k, n_group, topk_group, normalise, factor)
    scores = logits.sigmoid()
    choice = scores + bias
    if n_group > 1:
        grouped = choice.view(len(choice), n_group, -1)
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        choice = _keep_groups(choice, group_scores, topk_group, -torch.inf)
    ids = choice.topk(top_k, dim=-1).indices
    return ids, _scale(scores.gather(1, ids), normalise, factor)


def softmax_gate(
    logits: torch.Tensor,  # [T, num_experts] float32
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    *,
    normalise: bool = False,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # ids [T, top_k] int64, weights [T, top_k] float32
    """DeepSeek-V2 (report, section 2.2.2): a group's score is its best expert's; n_group 1 is the
    greedy choice. `normalise` and `factor` as for sigmoid_gate."""
    if gpu_kernels(logits):
        from kernels.gpu import route as gpu

        return gpu.gate(logits, None, top_k, n_group, topk_group, normalise, factor)
    scores = logits.softmax(dim=-1)
    if n_group > 1:
        group_scores = scores.view(len(scores), n_group, -1).amax(-1)
        scores = _keep_groups(scores, group_scores, topk_group, 0.0)
    weights, ids = scores.topk(top_k, dim=-1)
    return ids, _scale(weights, normalise, factor)


def _scale(weights: torch.Tensor, normalise: bool, factor: float) -> torch.Tensor:
    """[T, top_k], each row divided by its sum where `normalise`, times `factor`."""
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if factor == 1.0 else weights * factor


def _keep_groups(
    scores: torch.Tensor, group_scores: torch.Tensor, topk_group: int, other: float
) -> torch.Tensor:
    """scores [T, E] with the experts outside the best topk_group groups set to `other`."""
    kept = group_scores.topk(topk_group, dim=-1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    per_group = scores.shape[1] // group_scores.shape[1]
    return scores.masked_fill(outside.repeat_interleave(per_group, dim=1), other)
