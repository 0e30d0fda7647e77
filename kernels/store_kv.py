"""Scatters the new tokens' KV into cache rows."""

from __future__ import annotations

import torch

from kernels.dispatch import cpu_kernels, gpu_kernels


def store_rows(
    cache: torch.Tensor,  # [rows, ...]
    rows: torch.Tensor,  # [N] int64, distinct but for padding
    tokens: torch.Tensor | None,  # [N] int64: the source tokens; None: all T = N of them, in order
    *parts: torch.Tensor,  # each [T, ...]; more than one: 2-d, side by side in a row
) -> None:
    """cache[rows[i]] = the parts of token tokens[i], cast to the cache's dtype."""
    plain = tokens is None and cache.dim() == 2 and cache.dtype == torch.float32
    plain = plain and all(part.stride(1) == 1 for part in parts)
    if plain and cpu_kernels(cache, *parts) is not None:
        from kernels.cpu import store as cpu

        cpu.store_rows(cache, rows, *parts)
        return
    if gpu_kernels(cache, *parts) and len(parts) <= 2:
        from kernels.gpu import store as gpu

        gpu.store_rows(cache, rows, tokens, *parts)
        return
    begin = 0
    for part in parts:
        if tokens is not None:
            part = part[tokens]
        target = cache if len(parts) == 1 else cache[:, begin : begin + part.shape[1]]
        target.index_copy_(0, rows, part.to(cache.dtype))
        begin += part.shape[1]
