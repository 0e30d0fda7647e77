"""Draws against the torch form: the same tokens, as float64 would have them too."""

from __future__ import annotations

import numpy as np
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


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 2}], ids=str
)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_whatever_the_logits_are_a_token_of_the_vocabulary_is_drawn(
    how: dict, filters: dict, device: torch.device
) -> None:
    """NaN is no candidate, inf the best one; the vocabulary is no multiple of the block."""
    nan, inf = torch.nan, torch.inf
    logits = torch.full((5, 70), -3.0, device=device)
    logits[0] = nan
    logits[1, :69], logits[1, 69] = nan, -50.0
    logits[2, 67] = inf
    logits[3] = -inf
    logits[4, ::2], logits[4, 5] = nan, 40.0
    draws = [Draw(mix(i), **how, **filters) for i in range(5)]
    with np.errstate(over="ignore"):  # in the interpreter, of what then is the weight 0
        got = sampling.draw(logits, draws, block=64).tolist()
    assert got == [0, 69, 67, 0, 5]
    assert draw(logits.cpu(), draws).tolist() == got


def key_of(token: int, bits: int) -> int:
    """The key that gives this token these 32 bits: the specification's steps, backwards."""
    mask = (1 << 64) - 1

    def undone(z: int, shift: int) -> int:
        found = z
        for _ in range(64 // shift + 1):
            found = z ^ (found >> shift)
        return found

    z = bits << 32
    z = undone(z * pow(0x94D049BB133111EB, -1, 1 << 64) & mask, 27)
    z = undone(z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask, 30)
    return (z - token * 0x9E3779B97F4A7C15) & mask


def test_the_only_token_that_a_filter_keeps_is_drawn_whatever_its_number(
    device: torch.device,
) -> None:
    """The highest of 2**32 numbers are rounded to 1, whose logarithm has no bound."""
    logits = torch.zeros(1, 90, device=device)
    logits[0, 77] = 5.0
    key = key_of(77, 0xFFFFFFFF)
    numbers = exponentials(key, 90, torch.device("cpu"))
    assert int(numbers.argmax()) == 77 and bool(numbers.isfinite().all()) and numbers[77] > 16
    for filters in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        how = [Draw(key, 1.0, **filters)]
        assert draw(logits.cpu(), how).tolist() == [77]
        assert sampling.draw(logits, how, block=64).tolist() == [77]


def test_nothing_to_draw(device: torch.device) -> None:
    assert sampling.draw(torch.empty(0, 9, device=device), []).shape == (0,)


@pytest.mark.parametrize("key", [1, (1 << 64) - 1, mix(77)])
def test_its_numbers_are_the_specified_ones(key: int, device: torch.device) -> None:
    """Equal logits: the token of the smallest number is drawn."""
    want = exponentials(key, 700, torch.device("cpu"))
    flat = torch.zeros(1, 700, device=device)
    assert sampling.draw(flat, [Draw(key, 1.0)]).item() == int(want.argmin())
