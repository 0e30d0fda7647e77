"""Softmax attention in plain torch: the specification of the faster kernels, and the CPU back end
where there is none. Knows neither pages nor requests: keys come as tensors or as cache rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

_LOWEST = torch.finfo(torch.float32).min
_TINY = torch.finfo(torch.float32).tiny


class Partial(NamedTuple):
    """Attention over a part of the keys. Parts merge by log-sum-exp; a query that no key of the
    part is allowed for has out 0 and lse -inf, never NaN."""

    out: torch.Tensor  # [G, M, V] float32
    lse: torch.Tensor  # [G, M, 1] float32, natural log


def attend(
    q: torch.Tensor,  # [G, M, D], scaled; M = num_queries · heads, query-major
    k: torch.Tensor,  # [G, L, D]
    v: torch.Tensor,  # [G, L, V]
    allowed: torch.Tensor | None,  # bool [num_queries, W] or [G, num_queries, W]; None: every key
) -> Partial:
    """Attention of M query rows in each of G groups, float32 inside whatever the dtypes.

    `allowed` speaks of the last W keys; the L - W before them are allowed for every query.
    """
    scores = torch.bmm(q.float(), k.float().transpose(1, 2))  # [G, M, L]
    if allowed is not None:
        num_queries, width = allowed.shape[-2:]
        tail = scores.view(q.shape[0], num_queries, -1, k.shape[1])[..., k.shape[1] - width :]
        tail.masked_fill_(~allowed.unsqueeze(-2), -torch.inf)
    # A finite stand-in for the maximum of nothing: exp(-inf - lowest) is 0, not NaN.
    highest = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights, v.float()).div_(total.clamp_min(_TINY))
    return Partial(out, highest + total.log())


def merge(a: Partial | None, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys."""
    if a is None:
        return b
    lse = torch.logaddexp(a.lse, b.lse)
    base = lse.clamp_min(_LOWEST)
    return Partial(a.out * (a.lse - base).exp() + b.out * (b.lse - base).exp(), lse)


def causal(num_queries: int, width: int, first: int, device: torch.device) -> torch.Tensor:
    """bool [num_queries, width]: query i may see the keys 0 .. first + i."""
    mask = torch.ones((num_queries, width), dtype=torch.bool, device=device)
    return mask.tril(first)


def mla_gathered(
    q: torch.Tensor,  # [N, H, R], scaled: rope part only (R = rope) or latent | rope (R = D)
    cache: torch.Tensor,  # [rows, D]: latent, then rope key
    rows: torch.Tensor,  # [N, K] int64, all of them written rows
    allowed: torch.Tensor | None,  # bool [N, K]: which rows count; None: all
    latent_dim: int,
) -> torch.Tensor:  # [N, H, latent_dim] float32
    """Latent attention where each query reads its own rows; padding is any written row."""
    own = cache[rows]  # [N, K, D]
    keys = own[..., own.shape[-1] - q.shape[-1] :]
    mask = None if allowed is None else allowed.unsqueeze(1)
    return attend(q, keys, own[..., :latent_dim], mask).out


def gqa_gathered(
    q: torch.Tensor,  # [N, num_heads, D], scaled
    keys: torch.Tensor,  # [rows, num_kv_heads, D]
    values: torch.Tensor,  # [rows, num_kv_heads, D]
    rows: torch.Tensor,  # [N, K] int64, all of them written rows
    allowed: torch.Tensor | None,  # bool [N, K]
) -> torch.Tensor:  # [N, num_heads, D] float32
    """Grouped-query attention where each query reads its own rows; padding is any written row."""
    num, num_heads, dim = q.shape
    num_kv = keys.shape[1]
    k = keys[rows].transpose(1, 2).flatten(0, 1)  # [N · num_kv_heads, K, D]
    v = values[rows].transpose(1, 2).flatten(0, 1)
    mask = None if allowed is None else allowed.repeat_interleave(num_kv, 0).unsqueeze(1)
    out = attend(q.reshape(num * num_kv, num_heads // num_kv, dim), k, v, mask).out
    return out.view(num, num_heads, dim)
