"""Attention over keys that come part by part, each part's result merged into the earlier ones' by
log-sum-exp (Dao et al., FlashAttention, section 3.1). Knows neither where the parts come from nor
how many there are."""

from __future__ import annotations

from typing import Final

import torch

from kernels.attention import Partial, attend, causal, merge
from kernels.dispatch import fall_back, gpu_kernels

_WORKSPACE_BYTES: Final = {"cpu": 16 << 20, "cuda": 1 << 30}
_SLICE_QUERIES: Final = 128  # small enough that causal work above the diagonal is skipped


def workspace_bytes(device: torch.device) -> int:
    """Of scores or gathered rows, at a time: what stays in a CPU's cache, or fills a GPU."""
    return _WORKSPACE_BYTES[device.type]


def attend_causal(
    q: torch.Tensor,  # [M, num_heads, D]
    k: torch.Tensor,  # [L, num_kv_heads, D]
    v: torch.Tensor,  # [L, num_kv_heads, V]
    first: int,  # query i sees the keys 0 .. first + i · stride of this part; may be negative
    stride: int,
    scale: float,
    earlier: Partial | None = None,  # of the parts before; it may be written over
) -> Partial:  # out [M, num_heads, V], lse [M, num_heads, 1]
    """Attention of a run of queries over one more part of their keys."""
    if gpu_kernels(q, k, v):
        from kernels.gpu import attention as gpu

        if (why := gpu.declines(q, k)) is None:
            found: Partial = gpu.attend_causal(q, k, v, first, stride, scale, earlier)
            return found
        fall_back("attend_causal", why)
    num, num_heads, dim = q.shape
    num_kv, width = v.shape[1:]
    group = num_heads // num_kv
    if earlier is None:
        out = torch.zeros((num, num_heads, width), dtype=torch.float32, device=q.device)
        lse = torch.full((num, num_heads, 1), -torch.inf, device=q.device)
        earlier = Partial(out, lse)
    grouped = q.reshape(num, num_kv, group, dim).transpose(0, 1)  # [num_kv, M, group, D]
    out, lse = (t.view(num, num_kv, group, -1).transpose(0, 1) for t in earlier)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    step = min(_SLICE_QUERIES, max(1, workspace_bytes(q.device) // (4 * num_heads * len(k))))
    for a in range(0, num, step):
        b = min(a + step, num)
        visible = min(len(k), first + (b - 1) * stride + 1)
        if visible <= 0:
            continue
        own = grouped[:, a:b].flatten(1, 2)
        free = max(0, min(visible, first + a * stride + 1))  # keys that all of these queries see
        tail = causal(b - a, visible - free, first + a * stride - free, stride, q.device)
        mask = tail if visible > free else None
        part = attend(own, keys[:, :visible], values[:, :visible], mask, scale)
        before = Partial(out[:, a:b].flatten(1, 2), lse[:, a:b].flatten(1, 2))
        both = merge(before, part)
        out[:, a:b] = both.out.view(num_kv, b - a, group, width)
        lse[:, a:b] = both.lse.view(num_kv, b - a, group, 1)
    return earlier


def mla_rows_part(
    q: torch.Tensor,  # [N, H, R], as for kernels.attention.mla_rows
    cache: torch.Tensor,  # [L, D]: latent, then rope key
    rows: torch.Tensor,  # [N, K] int64; beyond the counts any valid index
    counts: torch.Tensor,  # [N] int64, 0 .. K
    latent_dim: int,
    scale: float,
) -> Partial:  # out [N, H, latent_dim], lse [N, H, 1]
    """kernels.attention.mla_rows before the values, over one part of the rows that are read."""
    if gpu_kernels(q, cache, rows):
        from kernels.gpu import attention as gpu

        if (why := gpu.declines(q, cache, latent_dim)) is None:
            found: Partial = gpu.mla_rows_part(q, cache, rows, counts, latent_dim, scale)
            return found
        fall_back("mla_rows_part", why)
    width = max(1, int(counts.max()))
    inside = torch.arange(width, device=rows.device)
    step = max(1, workspace_bytes(rows.device) // (width * cache.shape[1] * 4))
    parts = []
    for a in range(0, len(q), step):
        allowed = inside < counts[a : a + step].unsqueeze(1)  # [n, width]
        own = cache[rows[a : a + step, :width].masked_fill(~allowed, 0)]  # [n, width, D]
        keys = own[..., own.shape[-1] - q.shape[-1] :]
        latent = own[..., :latent_dim]
        parts.append(attend(q[a : a + step], keys, latent, allowed.unsqueeze(1), scale))
    return Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
