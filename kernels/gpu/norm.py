"""RMS and layer norm, several rows a program. The specification is kernels.norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096  # of a program, so that short rows share one


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,  # [outer, inner, width], any strides but the last
    weight,  # [width]
    out,  # [outer · inner, width]
    rows,
    inner,
    width,
    outer_stride,
    inner_stride,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]  # [ROWS, WIDTH]
    begin = row // inner * outer_stride + row % inner * inner_stride
    wide = tl.load(x + begin[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)  # [ROWS]
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    # Rounded before the weight comes in, as the checkpoints' own code has it.
    normed = (wide * scale[:, None]).to(out.dtype.element_ty).to(tl.float32) * w[None, :]
    tl.store(out + row[:, None] * width + column[None, :], normed, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm(
    x,  # [outer, inner, width], any strides but the last
    weight,  # [width]
    bias,  # [width]
    out,  # [outer · inner, width]
    rows,
    inner,
    width,
    outer_stride,
    inner_stride,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]  # [ROWS, WIDTH]
    begin = row // inner * outer_stride + row % inner * inner_stride
    wide = tl.load(x + begin[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(wide, axis=1) / width  # [ROWS]
    centred = tl.where(inside, wide - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / width + eps)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    normed = centred * scale[:, None] * w[None, :] + b[None, :]
    tl.store(out + row[:, None] * width + column[None, :], normed, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] contiguous -> like x, contiguous."""
    return _launch(_rms_norm, x, (weight,), eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """x [..., D], weight and bias [D] contiguous -> like x, contiguous."""
    return _launch(_layer_norm, x, (weight, bias), eps)


def _launch(
    kernel, x: torch.Tensor, parameters: tuple[torch.Tensor, ...], eps: float
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous().view(-1, x.shape[-1])
    width = x.shape[-1]
    rows = x.numel() // width
    if rows == 0:
        return out
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    outer_stride = x.stride(0) if x.dim() > 1 else 0
    wide = triton.next_power_of_2(width)
    per_program = max(1, _ELEMENTS // wide)
    kernel[(triton.cdiv(rows, per_program),)](
        x, *parameters, out, rows, inner, width, outer_stride, inner_stride, eps,
        ROWS=per_program, WIDTH=wide, num_warps=8 if wide >= 4096 else 4,
    )  # fmt: skip
    return out
