"""The gates against a token-by-token reading of the papers."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.route import sigmoid_gate, softmax_gate


def best(values: list[float], k: int, among: list[int]) -> list[int]:
    return sorted(among, key=lambda i: -values[i])[:k]


def in_groups(choice: list[float], num: int, keep: int, top: int) -> list[int]:
    """Experts of the `keep` groups with the largest sum of their `top` best choices."""
    per = len(choice) // num
    groups = [list(range(g * per, (g + 1) * per)) for g in range(num)]
    score = [sum(sorted((choice[i] for i in group), reverse=True)[:top]) for group in groups]
    return [i for g in best(score, keep, list(range(num))) for i in groups[g]]


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2), (3, 1), (6, 6)])
def test_sigmoid_gate(n_group: int, topk_group: int) -> None:
    torch.manual_seed(3)
    logits, bias = torch.randn(20, 12), torch.randn(12)
    ids, weights = sigmoid_gate(logits, bias, 2, n_group, topk_group)
    for row, own_ids, own_weights in zip(
        logits.tolist(), ids.tolist(), weights.tolist(), strict=True
    ):
        scores = [1 / (1 + math.exp(-z)) for z in row]
        choice = [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        assert own_ids == best(choice, 2, in_groups(choice, n_group, topk_group, 2))
        assert own_weights == pytest.approx([scores[i] for i in own_ids], rel=1e-5)


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2), (3, 1)])
def test_softmax_gate(n_group: int, topk_group: int) -> None:
    torch.manual_seed(4)
    logits = torch.randn(20, 12)
    ids, weights = softmax_gate(logits, 3, n_group, topk_group)
    for row, own_ids, own_weights in zip(
        logits.tolist(), ids.tolist(), weights.tolist(), strict=True
    ):
        total = sum(math.exp(z) for z in row)
        scores = [math.exp(z) / total for z in row]
        assert own_ids == best(scores, 3, in_groups(scores, n_group, topk_group, 1))
        assert own_weights == pytest.approx([scores[i] for i in own_ids], rel=1e-5)
