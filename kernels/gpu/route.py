"""The gates of DeepSeek-V2 and V3, a token a program. The specification is kernels.route."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _gate(
    logits,  # [T, num_experts] float32
    bias,  # [num_experts] float32; read where SIGMOID
    ids,  # [T, top_k] int64
    weights,  # [T, top_k] float32
    num_experts,
    factor,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # a power of two >= TOP_K
    GROUPS: tl.constexpr,
    GROUP_COUNT: tl.constexpr,  # a power of two >= GROUPS
    KEPT_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,  # a power of two >= num_experts / GROUPS
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUP_COUNT)
    member = tl.arange(0, PER_GROUP)
    size = num_experts // GROUPS
    expert = group[:, None] * size + member[None, :]  # [GROUP_COUNT, PER_GROUP]
    exists = (group < GROUPS)[:, None] & (member < size)[None, :]
    lowest = float("-inf")
    logit = tl.load(logits + token * num_experts + expert, mask=exists, other=lowest)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
        choice = score + tl.load(bias + expert, mask=exists, other=0.0)
    else:
        score = tl.exp(logit - tl.max(tl.max(logit, axis=1), axis=0))
        score = score / tl.sum(tl.sum(score, axis=1), axis=0)
        choice = score
    # NaN is nobody's choice: a token of nothing else goes to expert 0, not to one that is none.
    choice = tl.where(exists & (choice == choice), choice, lowest)
    if GROUPS > 1:
        best = tl.max(choice, axis=1)  # [GROUP_COUNT]
        if SIGMOID:
            at = tl.argmax(choice, axis=1)
            second = tl.max(tl.where(member[None, :] == at[:, None], lowest, choice), axis=1)
            best = tl.where(size > 1, best + second, best)
        best = tl.where(group < GROUPS, best, lowest)
        is_kept = group < 0
        for _ in tl.static_range(KEPT_GROUPS):
            kept = tl.argmax(best, axis=0)
            is_kept = is_kept | (group == kept)
            best = tl.where(group == kept, lowest, best)
        outside: tl.constexpr = float("-inf") if SIGMOID else 0.0
        choice = tl.where(exists & (is_kept[:, None] == 0), outside, choice)
    slot = tl.arange(0, CHOICES)
    chosen_ids = tl.zeros([CHOICES], tl.int64)
    chosen = tl.zeros([CHOICES], tl.float32)
    for i in tl.static_range(TOP_K):
        highest = tl.max(tl.max(choice, axis=1), axis=0)
        at = tl.min(tl.min(tl.where(choice == highest, expert, num_experts), axis=1), axis=0)
        weight = tl.sum(tl.sum(tl.where(expert == at, score, 0.0), axis=1), axis=0)
        chosen_ids = tl.where(slot == i, at.to(tl.int64), chosen_ids)
        chosen = tl.where(slot == i, weight, chosen)
        choice = tl.where(expert == at, lowest, choice)
    if NORMALISE:
        chosen = chosen / (tl.sum(chosen) + 1e-20)
    tl.store(ids + token * TOP_K + slot, chosen_ids, mask=slot < TOP_K)
    tl.store(weights + token * TOP_K + slot, chosen * factor, mask=slot < TOP_K)


def gate(
    logits: torch.Tensor,  # [T, num_experts] float32
    bias: torch.Tensor | None,  # [num_experts] float32: sigmoid gate; None: softmax gate
    top_k: int,
    n_group: int,
    topk_group: int,
    normalise: bool,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # [T, top_k] int64, [T, top_k] float32
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return ids, weights
    _gate[(num_tokens,)](
        logits.contiguous(), logits if bias is None else bias, ids, weights, num_experts, factor,
        TOP_K=top_k, CHOICES=triton.next_power_of_2(top_k), GROUPS=n_group,
        GROUP_COUNT=triton.next_power_of_2(n_group), KEPT_GROUPS=topk_group,
        PER_GROUP=triton.next_power_of_2(num_experts // n_group), SIGMOID=bias is not None,
        NORMALISE=normalise, num_warps=1,
    )  # fmt: skip
    return ids, weights
