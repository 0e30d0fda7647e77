"""Rotary position embedding of the leading part of each head. The specification is kernels.rope."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096  # of a program at most


@triton.jit
def _rope(
    x,  # [T, heads, 2 · half + rest], any strides but the last
    cos,  # [T, half] float32
    sin,  # [T, half] float32
    out,  # [T, heads, 2 · half + rest]
    heads,
    half,
    rest,
    x_stride,
    x_head_stride,
    scale,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,  # 0: there is none
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    source = x + token * x_stride + head[:, None] * x_head_stride  # [HEADS, 1]
    target = out + (token * heads + head[:, None]) * (2 * half + rest)
    i = tl.arange(0, HALF)
    angle = token * half + i
    c = tl.load(cos + angle, mask=i < half, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=i < half, other=0.0)[None, :]
    if INTERLEAVED:
        first, second = 2 * i[None, :], 2 * i[None, :] + 1
    else:
        first, second = i[None, :], half + i[None, :]
    inside = (head < heads)[:, None] & (i < half)[None, :]
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first, (a * c - b * s) * scale, mask=inside)
    tl.store(target + second, (b * c + a * s) * scale, mask=inside)
    if REST > 0:
        j = tl.arange(0, REST)
        inside = (head < heads)[:, None] & (j < rest)[None, :]
        passed = tl.load(source + 2 * half + j[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(target + 2 * half + j[None, :], passed * scale, mask=inside)


def rope_leading(
    x: torch.Tensor,  # [T, H, D] or [T, D]
    cos: torch.Tensor,  # [T, R / 2] float32
    sin: torch.Tensor,  # [T, R / 2] float32
    interleaved: bool,
    scale: float = 1.0,
) -> torch.Tensor:  # like x, contiguous
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.stride(-1) != 1:
        x = x.contiguous()
    half, width = cos.shape[1], x.shape[-1]
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    some = max(1, min(triton.next_power_of_2(heads), _ELEMENTS // triton.next_power_of_2(width)))
    rest = width - 2 * half
    _rope[(len(x), triton.cdiv(heads, some))](
        x, cos.contiguous(), sin.contiguous(), out, heads, half, rest, x.stride(0), head_stride,
        scale, INTERLEAVED=interleaved, HEADS=some, HALF=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0, num_warps=4,
    )  # fmt: skip
    return out
