"""Draws against the torch form: the same tokens, as float64 would have them too."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import sampling
from kernels.sampling import Draw, draw, exponentials, mix

FILTERS = [
    {},
    {"min_p": 0.1},
    {"top_p": 0.6},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws(filters: dict, device: torch.device) -> None:
    logits = 3 * torch.randn(2, 101, device=device)
    logits[1] = logits[1].round()  # ties at the borders
    how = [Draw(mix(i), 0.5 + 0.6 * i, **filters) for i in range(2)]
    got = sampling.draw(logits, how, block=64)
    assert got.tolist() == draw(logits.cpu(), how).tolist()


def test_greedy_takes_the_first_of_the_likeliest(device: torch.device) -> None:
    logits = torch.randn(4, 100, device=device).round()
    logits[1] = -torch.inf
    logits[2, :99] = -torch.inf
    got = sampling.draw(logits, [Draw()] * 4, block=64)
    assert got.tolist() == [int(row.argmax()) for row in logits.cpu()]


def test_tokens_that_are_ruled_out_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((2, 90), -torch.inf, device=device)
    logits[:, [3, 70]] = torch.tensor([0.0, 1.0], device=device)
    seen = {t for i in range(12) for t in sampling.draw(logits, [Draw(mix(i), 1.0)] * 2).tolist()}
    assert seen == {3, 70}


def test_nothing_to_draw(device: torch.device) -> None:
    assert sampling.draw(torch.empty(0, 9, device=device), []).shape == (0,)


@pytest.mark.parametrize("key", [1, (1 << 64) - 1, mix(77)])
def test_its_numbers_are_the_specified_ones(key: int, device: torch.device) -> None:
    """Equal logits: the token of the smallest number is drawn."""
    want = exponentials(key, 700, torch.device("cpu"))
    flat = torch.zeros(1, 700, device=device)
    assert sampling.draw(flat, [Draw(key, 1.0)]).item() == int(want.argmin())
