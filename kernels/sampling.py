"""One token for each row of logits, drawn by numbers hashed from a key of the row.

The token drawn is the one of largest p / e, e exponentially distributed for each row and token (the
Gumbel-max trick): where logits differ in their last bits, as they do between batches, a draw
changes only where two tokens all but tie. Knows no request: what a key is made of is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.dispatch import gpu_kernels

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TOP_CANDIDATES = 1024  # a nucleus is looked for among this many before the vocabulary is sorted


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row's token is chosen."""

    key: int = 0  # 64 bits
    temperature: float = 0.0  # 0: the likeliest, and the others do not count
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0


def draw(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """[S, V] float32 and S draws -> [S] int64 on the logits' device, which is not waited for.

    Order: temperature, top_k, top_p, min_p; of equal probabilities a filter keeps all or none.
    A logit that is NaN counts as -inf; of a row of these the first token is drawn.
    """
    if gpu_kernels(logits) and logits.stride(1) == 1:
        from kernels.gpu import sampling as gpu

        return gpu.draw(logits, draws)
    largest = torch.finfo(logits.dtype).max  # of which inf is one: it has a distance to itself
    logits = logits.nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    tokens = logits.argmax(-1)
    random = [row for row, how in enumerate(draws) if how.temperature > 0]
    if random:
        tokens[random] = _draw(logits[random], [draws[row] for row in random])
    return tokens


def exponentials(key: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[vocab_size] float32, finite, each exponentially distributed with mean 1: splitmix64 (Steele,
    Lea, Flood 2014) over key and token id, 32 bits of it as a uniform number."""
    ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
    z = ids * signed(_GOLDEN) + signed(key)
    z = (z ^ ((z >> 30) & (1 << 34) - 1)) * signed(_FIRST)
    z = (z ^ ((z >> 27) & (1 << 37) - 1)) * signed(_SECOND)
    bits = (z >> 32) & 0xFFFFFFFF
    # Small values decide a draw; they are exact here, as 32 bits near 0 fit a float.
    # The largest are rounded to 1, of which the logarithm would be infinite: no weight divided by
    # it is above that of a token that was ruled out.
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_max_(1.0 - 2.0**-24)
    return -torch.log1p(-uniform)


def mix(z: int) -> int:
    """The finaliser of splitmix64, of 64 bits."""
    mask = (1 << 64) - 1
    z = (z + _GOLDEN) & mask
    z = ((z ^ (z >> 30)) * _FIRST) & mask
    z = ((z ^ (z >> 27)) * _SECOND) & mask
    return z ^ (z >> 31)


def signed(z: int) -> int:
    """The same 64 bits as int64 has them."""
    return z - (1 << 64) if z >> 63 else z


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """[R, V] -> [R]"""
    temperature = torch.tensor([how.temperature for how in draws], device=logits.device)
    peak = logits.max(-1, keepdim=True).values
    probs = torch.softmax((logits - peak) / temperature[:, None], -1)
    for row, how in zip(probs, draws, strict=True):
        dropped = row < _least_kept(row, how)
        row /= exponentials(how.key, len(row), row.device)
        row.masked_fill_(dropped, 0.0)
    return probs.argmax(-1)


def _least_kept(probs: torch.Tensor, how: Draw) -> torch.Tensor | float:
    """The smallest probability that top_k, top_p and min_p keep; equal ones stay together."""
    vocab_size = probs.numel()
    top_k = min(how.top_k, vocab_size)
    if top_k <= 0 and how.top_p >= 1.0:
        return probs.max() * how.min_p if how.min_p > 0 else 0.0
    top = torch.topk(probs, top_k if top_k > 0 else min(_TOP_CANDIDATES, vocab_size)).values
    if top_k <= 0 and top.sum() < how.top_p:
        top = torch.sort(probs, descending=True).values
    least = top[-1]
    if how.top_p < 1.0:
        mass = top.sum() if top_k > 0 else 1.0
        before = top.double().cumsum(0) - top
        least = top[max(int((before < how.top_p * mass).sum()) - 1, 0)]
    return torch.maximum(least, top[0] * how.min_p)
