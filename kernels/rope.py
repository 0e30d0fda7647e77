"""Rotary position embedding (Su et al., RoFormer, section 3.2.2) on queries and keys, in both
layouts that checkpoints use. Knows no positions and no frequencies: angles come as cos and sin."""

from __future__ import annotations

import torch

from kernels.dispatch import cpu_kernels, gpu_kernels


def apply_rope(
    x: torch.Tensor,  # [T, H, D] or [T, D], D even
    cos: torch.Tensor,  # [T, D / 2] float32
    sin: torch.Tensor,  # [T, D / 2] float32
    interleaved: bool,
) -> torch.Tensor:  # like x, contiguous
    """Rotate pair i of every head by the angle of (cos[t, i], sin[t, i]).

    Pairs are the elements (2i, 2i + 1) when `interleaved`, else (i, i + D / 2); the output keeps
    x's order of elements and its dtype, the arithmetic is float32. Where only a part of a head is
    rotary, pass that slice of it. Raises ValueError where the widths do not agree.
    """
    if x.shape[-1] != 2 * cos.shape[-1] or cos.shape != sin.shape:
        raise ValueError(
            f"x is {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: "
            "x must be twice as wide as cos and sin"
        )
    if x.dtype == torch.float32 and x.stride(-1) == 1 and cpu_kernels(x, cos) is not None:
        from kernels.cpu import rope as cpu

        return cpu.apply_rope(x, cos.contiguous(), sin.contiguous(), interleaved)
    if gpu_kernels(x, cos, sin):
        from kernels.gpu import rope as gpu

        return gpu.rope_leading(x, cos, sin, interleaved)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotate = _rotate_interleaved if interleaved else _rotate_halves
    return rotate(x.float(), cos, sin).to(x.dtype)


def rope_leading(
    x: torch.Tensor,  # [T, H, D] or [T, D]
    cos: torch.Tensor,  # [T, R / 2] float32, R <= D
    sin: torch.Tensor,  # [T, R / 2] float32
    interleaved: bool,
    scale: float = 1.0,
) -> torch.Tensor:  # like x, contiguous
    """The first R elements of every head rotated as by `apply_rope`, the others as they are; all
    of them times `scale`."""
    rotary = 2 * cos.shape[-1]
    if rotary < x.shape[-1] and gpu_kernels(x, cos, sin):
        from kernels.gpu import rope as gpu

        return gpu.rope_leading(x, cos, sin, interleaved, scale)
    out = apply_rope(x[..., :rotary], cos, sin, interleaved)
    if rotary < x.shape[-1]:
        out = torch.cat((out, x[..., rotary:]), dim=-1)
    return out if scale == 1.0 else out.mul_(scale)


def _rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    pairs = x.reshape(*x.shape[:-1], -1, 2).contiguous()  # [..., D / 2, 2]
    if pairs.storage_offset() % 2:  # a complex view must begin at an even element
        pairs = pairs.clone()
    # One complex product is several times fewer operations than four strided real ones.
    rotated = torch.view_as_complex(pairs) * torch.complex(cos, sin)
    return torch.view_as_real(rotated).flatten(-2)


def _rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)  # [..., D / 2] each
    return torch.cat(
        (
            (first * cos).addcmul_(second, sin, value=-1),
            (second * cos).addcmul_(first, sin),
        ),
        dim=-1,
    )
