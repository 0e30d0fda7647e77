"""Latent attention on Hopper for latents of 512 and rope keys of 64 in 16 bits: how the kernel is
called. The specification is kernels.attention; kernels.gpu.mla takes what this does not."""

from __future__ import annotations

import torch
import triton

from kernels.gpu.mla_hopper_kernel import attend
from kernels.gpu.shares import merge_pieces

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def takes(q: torch.Tensor, cache: torch.Tensor, latent_dim: int) -> bool:
    """Whether a call has this file's geometry. Few heads do not fill its tiles, but reading the
    rows takes longer than what is computed in vain."""
    fits = latent_dim == 512 and q.shape[2] == cache.shape[1] == 576
    return fits and q.dtype in (torch.bfloat16, torch.float16) and q.stride(2) == 1


def mla_latents(
    q: torch.Tensor,  # [N, H, 576]
    cache: torch.Tensor,  # [rows, 576]
    index: torch.Tensor,  # [N, K] rows, or [N, P] pages
    counts: torch.Tensor,  # [N]
    page_size: int,  # 0: the index holds rows
    scale: float,
    num_processors: int,
    pieces: int | None = None,
) -> torch.Tensor:  # [N, H, 512] in q's dtype
    num, num_heads, _ = q.shape
    out = torch.empty(num, num_heads, 512, dtype=q.dtype, device=q.device)
    tiles = triton.cdiv(num_heads, 64)
    if pieces is None:
        most = triton.cdiv(index.shape[1] * max(page_size, 1), 128)
        pieces = max(1, min(most, num_processors // (tiles * num)))
    shared = (q, cache, index, counts, page_size, scale, num_processors, pieces)
    if pieces == 1:
        _launch(*shared, out, out, False)
        return out
    part_out = torch.empty(pieces, num, num_heads, 512, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(pieces, num, num_heads, dtype=torch.float32, device=q.device)
    _launch(*shared, part_out, part_lse, True)
    merge_pieces(part_out, part_lse, counts, out, 128)
    return out


def mla_part(
    q: torch.Tensor,  # as for mla_latents
    cache: torch.Tensor,
    rows: torch.Tensor,  # [N, K]
    counts: torch.Tensor,
    scale: float,
    num_processors: int,
    out: torch.Tensor,  # [N, H, 512] float32, contiguous: is written
    lse: torch.Tensor,  # [N, H, 1] float32, contiguous: is written, natural
) -> None:
    """The same for a part of the rows, with what it takes to merge it with other parts."""
    _launch(q, cache, rows, counts, 0, scale, num_processors, 1, out, lse, True)
    lse.mul_(LN_2)


def _launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    page_size: int,
    scale: float,
    num_processors: int,
    pieces: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_partial: bool,
) -> None:
    num, num_heads, _ = q.shape
    items = triton.cdiv(num_heads, 64) * pieces * num
    attend[(min(items, num_processors),)](
        q, cache, index, counts, out, lse, q.stride(0), q.stride(1), cache.stride(0),
        index.stride(0), num, num_heads, items, pieces, scale * LOG2_E, page_size, is_partial,
        num_warps=4,
    )  # fmt: skip
