"""RMS norm in one pass over each row. The specification is kernels.norm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu.compiled import compiled
from kernels.cpu.tile import FP32, floats, tile
from kernels.cpu.vector import address, each, outlined, spread, store, widen


@intrinsic
def scaled_product(typingctx, scale, a, b, target, length):  # type: ignore[no-untyped-def]
    """target[i] = scale · a[i] · b[i] in fp32 for i < length."""
    signature = types.void(scale, a, b, target, length)

    def write(
        builder: ir.IRBuilder, scale: Any, left: Any, right: Any, target: Any, length: Any
    ) -> None:
        def step(i: ir.Value, lanes: int) -> None:
            x, y = (
                widen(builder, types.float32, address(builder, at, i, 4), lanes)
                for at in (left, right)
            )
            factor = scale if lanes == 1 else spread(builder, scale, lanes)
            store(builder, builder.fmul(builder.fmul(x, factor), y), target, i)

        each(builder, length, step)

    def generate(context, builder, sig, args):  # type: ignore[no-untyped-def]
        outlined(builder, "scaled_product", args, write)
        return context.get_dummy_value()

    return signature, generate


@compiled
def rms_norm_rows(
    x: int, ldx: int, num_rows: int, width: int, weight: int, eps: float, out: int
) -> None:
    """out [num_rows, width] of x (row stride ldx)."""
    square = np.empty(1, np.float32)
    for m in range(num_rows):
        row = x + 4 * m * ldx
        tile(1, 1, FP32, row, width, row, width, width, square.ctypes.data, 1, True)
        scale = np.float32(1 / math.sqrt(square[0] / width + eps))
        scaled_product(scale, row, weight, out + 4 * m * width, width)


@compiled
def layer_norm_rows(
    x: int, ldx: int, num_rows: int, width: int, weight: int, bias: int, eps: float, out: int
) -> None:
    """out [num_rows, width] of x (row stride ldx)."""
    scales, shifts = floats(weight, width), floats(bias, width)
    for m in range(num_rows):
        row, to = floats(x + 4 * m * ldx, width), floats(out + 4 * m * width, width)
        mean = np.float32(row.sum() / width)
        square = np.float32(0)
        for i in range(width):
            square += (row[i] - mean) ** 2
        scale = np.float32(1 / math.sqrt(square / width + eps))
        for i in range(width):
            to[i] = (row[i] - mean) * scale * scales[i] + shifts[i]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As kernels.norm.rms_norm, for fp32."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    num_rows, width = rows.shape
    out = torch.empty(x.shape)
    rms_norm_rows(
        rows.data_ptr(), rows.stride(0), num_rows, width, weight.data_ptr(), eps, out.data_ptr(),
    )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """As kernels.norm.layer_norm, for fp32 [T, D]."""
    out = torch.empty(x.shape)
    num_rows, width = x.shape
    layer_norm_rows(
        x.data_ptr(), x.stride(0), num_rows, width, weight.data_ptr(), bias.data_ptr(), eps,
        out.data_ptr(),
    )  # fmt: skip
    return out
