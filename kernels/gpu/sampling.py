"""Draws on the device, a row a program, with one copy up and none down. The specification is
kernels.sampling.

A filter's border is found by halving the range of weights: how many, or how much, lies above the
middle is counted in a pass over the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.sampling import Draw

_BLOCK: Final = 8192
_WORDS: Final = 5  # of a draw, 64 bits each
# splitmix64's constants as int64 has them.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _logits(row, at, vocab_size, BLOCK: tl.constexpr):
    """A block's logits, none above the largest float32; -inf for NaN and behind the vocabulary."""
    column = at + tl.arange(0, BLOCK)
    logit = tl.load(row + column, mask=column < vocab_size, other=float("-inf"))
    return tl.minimum(tl.where(logit == logit, logit, float("-inf")), _LARGEST)


@triton.jit
def _weights(row, at, vocab_size, peak, temperature, BLOCK: tl.constexpr):
    """exp((logit - peak) / temperature) of a block, 0 behind the vocabulary."""
    return tl.exp((_logits(row, at, vocab_size, BLOCK) - peak) / temperature)


@triton.jit
def _above(row, border, vocab_size, peak, temperature, BLOCK: tl.constexpr):
    """How many weights are > border, and how much they are together."""
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for at in range(0, vocab_size, BLOCK):
        weight = _weights(row, at, vocab_size, peak, temperature, BLOCK)
        is_above = weight > border
        number += is_above.to(tl.int32)
        mass += tl.where(is_above, weight, 0.0).to(tl.float64)
    return tl.sum(number), tl.sum(mass)


@triton.jit
def _exponential(column, key):
    """kernels.sampling.exponentials of these tokens."""
    z = column.to(tl.int64) * _GOLDEN + key
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    bits = (z >> 32) & 0xFFFFFFFF
    # Above -1, which the highest numbers would be rounded to.
    less = tl.maximum(-(bits.to(tl.float32) + 0.5) * (2.0**-32), 2.0**-24 - 1.0)
    # log1p: the error of 1 + x in log(1 + x) is undone by dividing by what was really added.
    rounded = 1.0 + less
    exact = rounded == 1.0
    added = tl.where(exact, 1.0, rounded - 1.0)
    return tl.where(exact, -less, -tl.log(rounded) * (less / added))


@triton.jit
def _draw(
    logits,  # [S, row_stride] float32
    draws,  # [S, 5] int64: key, top_k; and as float64 temperature, top_p, min_p
    tokens,  # [S] int64
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    row = logits + s * row_stride
    key = tl.load(draws + s * 5)
    top_k = tl.load(draws + s * 5 + 1)
    temperature = tl.load(draws + s * 5 + 2).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(draws + s * 5 + 3).to(tl.float64, bitcast=True)
    min_p = tl.load(draws + s * 5 + 4).to(tl.float64, bitcast=True).to(tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.full([BLOCK], 2147483647, tl.int32)
    for at in range(0, vocab_size, BLOCK):
        column = at + tl.arange(0, BLOCK)
        logit = _logits(row, at, vocab_size, BLOCK)
        is_better = (column < vocab_size) & ((logit > best) | (best_at == 2147483647))
        best = tl.where(is_better, logit, best)
        best_at = tl.where(is_better, column, best_at)
    peak = tl.maximum(tl.max(best, axis=0), -_LARGEST)  # finite: -inf less it is -inf, not NaN
    if temperature > 0:
        # The least weight that is kept; weights are in [0, 1], and their bits in their order.
        least = min_p
        mass = temperature.to(tl.float64) * 0.0
        if (top_k > 0) & (top_k < vocab_size):
            low = temperature.to(tl.int32, bitcast=True) * 0 - 1
            high = low + 1 + 0x3F800000  # of 1.0: nothing is above it
            while high - low > 1:
                middle = (low + high) >> 1
                border = middle.to(tl.float32, bitcast=True)
                number, weight = _above(row, border, vocab_size, peak, temperature, BLOCK)
                if number < top_k:
                    high = middle
                else:
                    low = middle
            border = high.to(tl.float32, bitcast=True)  # the top_k-th largest weight
            number, mass = _above(row, border, vocab_size, peak, temperature, BLOCK)
            mass += (top_k - number).to(tl.float64) * border.to(tl.float64)
            least = tl.maximum(least, border)
        elif top_p < 1.0:
            number, mass = _above(row, -1.0, vocab_size, peak, temperature, BLOCK)
        if top_p < 1.0:
            low = temperature.to(tl.int32, bitcast=True) * 0 - 1
            high = low + 1 + 0x3F800000
            while high - low > 1:
                middle = (low + high) >> 1
                border = middle.to(tl.float32, bitcast=True)
                number, weight = _above(row, border, vocab_size, peak, temperature, BLOCK)
                if weight < top_p * mass:
                    high = middle
                else:
                    low = middle
            least = tl.maximum(least, high.to(tl.float32, bitcast=True))
        best = tl.full([BLOCK], -1.0, tl.float32)
        for at in range(0, vocab_size, BLOCK):
            column = at + tl.arange(0, BLOCK)
            weight = _weights(row, at, vocab_size, peak, temperature, BLOCK)
            share = tl.where(weight >= least, weight / _exponential(column, key), 0.0)
            is_better = (column < vocab_size) & (share > best)
            best = tl.where(is_better, share, best)
            best_at = tl.where(is_better, column, best_at)
    highest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == highest, best_at, 2147483647), axis=0)
    tl.store(tokens + s, token.to(tl.int64))


def draw(
    logits: torch.Tensor,  # [S, V] float32
    draws: Sequence[Draw],
    block: int = _BLOCK,
) -> torch.Tensor:  # [S] int64
    num, vocab_size = logits.shape
    tokens = torch.empty(num, dtype=torch.int64, device=logits.device)
    if num == 0:
        return tokens
    words = torch.empty((num, _WORDS), dtype=torch.int64, pin_memory=logits.is_cuda)
    words[:, :2] = torch.tensor([[_signed(how.key), how.top_k] for how in draws])
    words.view(torch.float64)[:, 2:] = torch.tensor(
        [[how.temperature, how.top_p, how.min_p] for how in draws], dtype=torch.float64
    )
    _draw[(num,)](
        logits, words.to(logits.device, non_blocking=True), tokens, vocab_size, logits.stride(0),
        BLOCK=min(block, triton.next_power_of_2(vocab_size)), num_warps=16,
    )  # fmt: skip
    return tokens


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key
