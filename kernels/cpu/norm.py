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
from kernels.cpu.tile import FP32, tile
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
    x: int, ldx: int, num_rows: int, width: int, weight: int, eps: float, out: int, square: Any
) -> None:
    """out [num_rows, width] of x (row stride ldx); `square` is one fp32 to work in."""
    for m in range(num_rows):
        row = x + 4 * m * ldx
        tile(1, 1, FP32, row, width, row, width, width, square.ctypes.data, 1, True)
        scale = np.float32(1 / math.sqrt(square[0] / width + eps))
        scaled_product(scale, row, weight, out + 4 * m * width, width)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As kernels.norm.rms_norm, for fp32."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    num_rows, width = rows.shape
    out = torch.empty(x.shape)
    rms_norm_rows(
        rows.data_ptr(), rows.stride(0), num_rows, width, weight.data_ptr(), eps, out.data_ptr(),
        np.empty(1, np.float32),
    )  # fmt: skip
    return out
