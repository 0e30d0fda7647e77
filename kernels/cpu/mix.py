"""The inner loop of attention's second half: weighted sums of scattered rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.vector import (
    F32,
    FUSED,
    I64,
    address,
    each,
    outlined,
    spread,
    store,
    vector,
    widen,
)  # fmt: skip


@intrinsic(prefer_literal=True)
def mix(  # type: ignore[no-untyped-def]
    typingctx, heads, count, weights, ldw, row0, row1, row2, row3, target, ldt, length, first
):
    """target[m, i] = (first ? 0 : target[m, i]) + sum over j < count of weights[m, j] row_j[i],
    for m < heads and i < length.

    fp32 all; `weights` and `target` have row strides ldw and ldt, the rows are addresses of their
    own. Several rows at once load and store the target once for all of them.
    """
    num_heads, num_rows = heads.literal_value, count.literal_value
    signature = types.void(
        heads, count, weights, ldw, row0, row1, row2, row3, target, ldt, length, first
    )

    def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
        outlined(b, f"mix_{num_heads}x{num_rows}", args[2:], _mix_body(num_heads, num_rows))
        return context.get_dummy_value()

    return signature, generate


def _mix_body(num_heads: int, num_rows: int) -> Callable[..., None]:
    def write(b: ir.IRBuilder, weights: Any, ldw: Any, *rest: Any) -> None:
        rows, (target, ldt, length, first) = rest[:num_rows], rest[4:]
        number = [ir.Constant(I64, i) for i in range(max(num_heads, num_rows))]
        targets = [address(b, target, b.mul(number[m], ldt), 4) for m in range(num_heads)]
        factors = []
        for m in range(num_heads):
            line = address(b, weights, b.mul(number[m], ldw), 4)
            at = [address(b, line, number[j], 4) for j in range(num_rows)]
            factors.append([b.load(b.inttoptr(a, F32.as_pointer())) for a in at])

        def step(i: ir.Value, lanes: int) -> None:
            wide = [widen(b, types.float32, address(b, row, i, 4), lanes) for row in rows]
            zero = ir.Constant(F32, 0.0) if lanes == 1 else vector(F32, 0.0, lanes)
            for own, at in zip(factors, targets, strict=True):
                total = b.select(first, zero, widen(b, types.float32, address(b, at, i, 4), lanes))
                for value, factor in zip(wide, own, strict=True):
                    scale = factor if lanes == 1 else spread(b, factor, lanes)
                    total = b.fadd(total, b.fmul(value, scale, flags=FUSED), flags=FUSED)
                store(b, total, at, i)

        each(b, length, step)

    return write
