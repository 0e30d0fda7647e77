"""The inner loops of the CPU kernels, callable from compiled code.

Addresses are integers in bytes, strides are in elements. Nothing here allocates or checks bounds.
Every tile shape adds the same eight partial sums in the same order, so a result never depends on
which tile computed it: that is what makes the products built from these batch invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.vector import (
    F32,
    FUSED,
    I64,
    LANES,
    address,
    each,
    loop,
    outlined,
    silu,
    size,
    spread,
    store,
    sum_lanes,
    vector,
    widen,
)  # fmt: skip

# A weight's storage is told by the type of a scalar passed along: numba compiles one form of a
# kernel for each.
BF16, FP16, FP32 = np.uint16(0), np.int16(0), np.float32(0)


@intrinsic(prefer_literal=True)
def tile(  # type: ignore[no-untyped-def]
    typingctx, mr, nr, kind, x, ldx, w, ldw, k, y, ldy, first
):
    """y[m, n] = (first ? 0 : y[m, n]) + sum over k of x[m, k] w[n, k], for m < mr and n < nr.

    x fp32 [mr, k] of row stride ldx; w [nr, k] of stride ldw stored as `kind`; y fp32, ldy.
    """
    rows, cols, stored = mr.literal_value, nr.literal_value, types.unliteral(kind)
    signature = types.void(mr, nr, kind, x, ldx, w, ldw, k, y, ldy, first)

    def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
        outlined(b, f"tile_{rows}x{cols}_{stored}", args[3:], _tile_body(rows, cols, stored))
        return context.get_dummy_value()

    return signature, generate


def _tile_body(rows: int, cols: int, stored: Any) -> Callable[..., None]:
    def write(
        b: ir.IRBuilder, x: Any, ldx: Any, w: Any, ldw: Any, k: Any, y: Any, ldy: Any, first: Any
    ) -> None:
        number = [ir.Constant(I64, i) for i in range(max(rows, cols))]
        x_rows = [address(b, x, b.mul(number[m], ldx), 4) for m in range(rows)]
        w_rows = [address(b, w, b.mul(number[n], ldw), size(stored)) for n in range(cols)]

        def step(lanes: int) -> Callable[[ir.Value, list[Any]], list[ir.Value]]:
            def body(i: ir.Value, sums: list[Any]) -> list[ir.Value]:
                xs = [widen(b, types.float32, address(b, row, i, 4), lanes) for row in x_rows]
                out = []
                for n in range(cols):
                    ws = widen(b, stored, address(b, w_rows[n], i, size(stored)), lanes)
                    for m in range(rows):
                        product = b.fmul(xs[m], ws, flags=FUSED)
                        out.append(b.fadd(sums[n * rows + m], product, flags=FUSED))
                return out

            return body

        whole = b.and_(k, ir.Constant(I64, -LANES))
        zeros = [vector(F32, 0.0, LANES)] * (rows * cols)
        totals = [sum_lanes(b, s) for s in loop(b, number[0], whole, LANES, zeros, step(LANES))]
        totals = loop(b, whole, k, 1, totals, step(1))
        for n in range(cols):
            for m in range(rows):
                at = address(b, y, b.add(b.mul(number[m], ldy), number[n]), 4)
                before = b.load(b.inttoptr(at, F32.as_pointer()))
                before = b.select(first, ir.Constant(F32, 0.0), before)
                b.store(b.fadd(before, totals[n * rows + m]), b.inttoptr(at, F32.as_pointer()))

    return write


@intrinsic
def expand(typingctx, kind, source, target, length):  # type: ignore[no-untyped-def]
    """target[i] = fp32 of source[i], stored as `kind`, for i < length."""
    signature = types.void(kind, source, target, length)

    def write(b: ir.IRBuilder, source: Any, target: Any, length: Any) -> None:
        def step(i: ir.Value, lanes: int) -> None:
            store(b, widen(b, kind, address(b, source, i, size(kind)), lanes), target, i)

        each(b, length, step)

    def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
        outlined(b, f"expand_{kind}", args[1:], write)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def silu_mul(typingctx, gate, up, target, length):  # type: ignore[no-untyped-def]
    """target[i] = silu(gate[i]) * up[i] in fp32 for i < length; target may be gate or up."""
    signature = types.void(gate, up, target, length)

    def write(b: ir.IRBuilder, gate: Any, up: Any, target: Any, length: Any) -> None:
        def step(i: ir.Value, lanes: int) -> None:
            g, u = (widen(b, types.float32, address(b, at, i, 4), lanes) for at in (gate, up))
            store(b, b.fmul(silu(b, g, lanes), u), target, i)

        each(b, length, step)

    def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
        outlined(b, "silu_mul", args, write)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_scaled(typingctx, scale, source, target, length, first):  # type: ignore[no-untyped-def]
    """target[i] = (first ? 0 : target[i]) + scale * source[i] in fp32 for i < length."""
    signature = types.void(scale, source, target, length, first)

    def write(
        b: ir.IRBuilder, scale: Any, source: Any, target: Any, length: Any, first: Any
    ) -> None:
        def step(i: ir.Value, lanes: int) -> None:
            value = widen(b, types.float32, address(b, source, i, 4), lanes)
            before = widen(b, types.float32, address(b, target, i, 4), lanes)
            factor, zero = scale, ir.Constant(F32, 0.0)
            if lanes > 1:
                factor, zero = spread(b, scale, lanes), vector(F32, 0.0, lanes)
            before = b.select(first, zero, before)
            product = b.fmul(value, factor, flags=FUSED)
            store(b, b.fadd(before, product, flags=FUSED), target, i)

        each(b, length, step)

    def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
        outlined(b, "add_scaled", args, write)
        return context.get_dummy_value()

    return signature, generate
