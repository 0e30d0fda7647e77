"""Rotary position embedding. The specification is kernels.rope."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.compiled import compiled
from kernels.cpu.tile import floats


@compiled
def rope_rows(
    x: int, token_stride: int, head_stride: int, num_tokens: int, num_heads: int, width: int,
    cos: int, sin: int, angle_stride: int, interleaved: bool, out: int,
) -> None:  # fmt: skip
    """out [num_tokens, num_heads, width], contiguous; the tokens' angles have a stride too."""
    half = width // 2
    step = 2 if interleaved else 1
    other = 1 if interleaved else half
    for t in range(num_tokens):
        c, s = floats(cos + 4 * t * angle_stride, half), floats(sin + 4 * t * angle_stride, half)
        for h in range(num_heads):
            head = floats(x + 4 * (t * token_stride + h * head_stride), width)
            to = floats(out + 4 * (t * num_heads + h) * width, width)
            for i in range(half):
                first, second = head[step * i], head[step * i + other]
                to[step * i] = first * c[i] - second * s[i]
                to[step * i + other] = second * c[i] + first * s[i]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As kernels.rope.apply_rope, for fp32 whose last dimension is contiguous."""
    out = torch.empty(x.shape)
    num_heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    rope_rows(
        x.data_ptr(), x.stride(0), head_stride, x.shape[0], num_heads, x.shape[-1],
        cos.data_ptr(), sin.data_ptr(), cos.stride(0), interleaved, out.data_ptr(),
    )  # fmt: skip
    return out
