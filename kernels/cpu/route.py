"""The gate of DeepSeek-V3 without groups. The specification is kernels.route."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compiled import compiled
from kernels.cpu.tile import floats, integers


@compiled
def choose(
    logits: int, num_tokens: int, num_experts: int, bias: int, top_k: int, normalise: bool,
    factor: float, ids: int, weights: int,
) -> None:  # fmt: skip
    """The top_k best of sigmoid(logits) + bias for each token, best first, the lower id of equals;
    ids [num_tokens, top_k] int64, weights fp32."""
    steers = floats(bias, num_experts)
    scores, choice = np.empty(num_experts, np.float32), np.empty(num_experts, np.float32)
    for t in range(num_tokens):
        row = floats(logits + 4 * t * num_experts, num_experts)
        chosen = integers(ids + 8 * t * top_k, top_k)
        out = floats(weights + 4 * t * top_k, top_k)
        for e in range(num_experts):
            scores[e] = 1 / (1 + math.exp(-row[e]))
            choice[e] = scores[e] + steers[e]
        total = np.float32(1e-20)
        for k in range(top_k):
            best = np.argmax(choice)
            chosen[k], out[k], choice[best] = best, scores[best], -np.inf
            total += scores[best]
        scale = np.float32(factor / total if normalise else factor)
        for k in range(top_k):
            out[k] *= scale


def sigmoid_gate(
    logits: Tensor, bias: Tensor, top_k: int, normalise: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """As kernels.route.sigmoid_gate with one group, for contiguous fp32."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64)
    weights = torch.empty(num_tokens, top_k)
    choose(
        logits.data_ptr(), num_tokens, num_experts, bias.data_ptr(), top_k, normalise, factor,
        ids.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return ids, weights
