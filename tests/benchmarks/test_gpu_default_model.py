"""How two cases are compared: the first difference of each prompt with its margins, divergence."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.gpu_default_model import Case, Difference, Found, compare, differences, is_right

FLOAT32, BFLOAT16 = Case("a", "cuda", "float32"), Case("b", "cuda", "bfloat16")


def found(tokens: list[list[int]], margin: float, probabilities: list[list[float]]) -> Found:
    margins = [[margin + at for at in range(len(own))] for own in tokens]
    return Found(tokens, margins, torch.tensor(probabilities).log(), {})


EXPECTED = found([[5, 6, 7], [8, 9]], 0.5, [[0.5, 0.5], [0.2, 0.8]])


def test_the_first_difference_is_told_with_the_margins_there():
    other = found([[5, 1, 2], [8, 9]], 0.25, [[0.5, 0.5], [0.2, 0.8]])
    assert differences(EXPECTED, other) == [Difference(0, 1, 6, 1, (1.5, 1.25))]
    row = compare(EXPECTED, other)
    assert row["equal_prompts"] == 1
    assert "prompt 0 differs at token 1: 1, not 6; margins there 1.2 and 1.5 nats" in str(
        row["differences"]
    )
    assert not is_right(FLOAT32, row)
    assert is_right(BFLOAT16, row)  # of 16 bits no equal tokens are asked


def test_divergence_decides():
    other = found([[5, 6, 7], [8, 9]], 0.5, [[0.25, 0.75], [0.2, 0.8]])
    row = compare(EXPECTED, other)
    assert row["divergence_max"] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert row["divergence_mean"] == pytest.approx(row["divergence_max"] / 2)
    assert not is_right(FLOAT32, row) and not is_right(BFLOAT16, row)
    assert is_right(FLOAT32, compare(EXPECTED, EXPECTED))
    assert not is_right(BFLOAT16, row | {"divergence_mean": math.nan})
