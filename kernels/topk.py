"""Exact top-k of index scores: score descending, then position ascending, so that chunks, shards
and kernels all choose alike. torch.topk alone breaks ties arbitrarily."""

from __future__ import annotations

import torch

from kernels.dispatch import gpu_kernels

MOST_ON_GPU = 16384  # of k: a program there holds twice as many scores in registers


def exact_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores [T, L] float32, -inf where a token may not be chosen -> int64 [T, min(k, L)].

    Columns of the k best, ascending; rows with fewer than k finite scores are filled with -1 at
    their end. -0.0 equals 0.0.
    """
    if k <= 0:
        raise ValueError(f"k must be positive, got {k}")
    width = min(k, scores.shape[1])
    if gpu_kernels(scores) and scores.dtype == torch.float32 and width <= MOST_ON_GPU:
        from kernels.gpu import topk as gpu

        return gpu.exact_topk(scores, width)
    values, columns = scores.topk(width, dim=-1, sorted=True)
    threshold = values[:, -1:]  # [T, 1]: the k-th best; -inf where fewer are finite
    at_least = scores >= threshold
    # Without a tie at the border, and with k finite scores, torch's set is the only one.
    if bool(((at_least.sum(-1) == width) & (threshold[:, 0] > -torch.inf)).all()):
        return columns.sort(dim=-1).values
    above = scores > threshold
    tied = at_least & ~above & (threshold > -torch.inf)
    room = width - above.sum(-1, keepdim=True)
    return columns_of(above | (tied & (tied.cumsum(-1) <= room)), width)


def columns_of(mask: torch.Tensor, width: int) -> torch.Tensor:
    """mask [T, L] with at most `width` True a row -> their columns [T, width] int64, ascending, -1
    behind them."""
    row, column = mask.nonzero(as_tuple=True)
    place = mask.cumsum(-1)[row, column] - 1
    out = torch.full((mask.shape[0], width), -1, dtype=torch.int64, device=mask.device)
    out[row, place] = column
    return out
