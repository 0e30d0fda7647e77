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
from numba import carray, types
from numba.extending import intrinsic

from kernels.cpu.compiled import compiled
from kernels.cpu.vector import (
    F32,
    FUSED,
    I64,
    LANES,
    address,
    each,
    indices,
    loop,
    outlined,
    prefetch,
    silu,
    size,
    spread,
    store,
    sum_lanes,
    vector,
    widen,
    widen_pairs,
)  # fmt: skip

# A weight's storage is told by the type of a scalar passed along: numba compiles one form of a
# kernel for each.
BF16, FP16, FP32 = np.uint16(0), np.int16(0), np.float32(0)


@intrinsic
def pointer(typingctx, address, kind):  # type: ignore[no-untyped-def]
    """The address as a pointer to numbers of the type of `kind`."""
    target = types.CPointer(types.unliteral(kind))
    signature = target(address, kind)

    def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
        return b.inttoptr(args[0], context.get_value_type(target))

    return signature, generate


@compiled
def floats(address: int, length: int) -> Any:
    """The fp32 numbers at an address as an array."""
    return carray(pointer(address, np.float32(0)), length)


@compiled
def integers(address: int, length: int) -> Any:
    """The int64 numbers at an address as an array."""
    return carray(pointer(address, np.int64(0)), length)


@intrinsic(prefer_literal=True)
def tile(  # type: ignore[no-untyped-def]
    typingctx, mr, nr, kind, x, ldx, w, ldw, k, y, ldy, first
):
    """y[m, n] = (first ? 0 : y[m, n]) + sum over k of x[m, k] w[n, k], for m < mr and n < nr.

    x fp32 [mr, k] of row stride ldx, as `arrange` leaves it; w [nr, k] of stride ldw stored as
    `kind`; y fp32, ldy.
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

        def add_products(i: ir.Value, ws: list[Any], sums: list[Any], lanes: int) -> list[Any]:
            xs = [widen(b, types.float32, address(b, row, i, 4), lanes) for row in x_rows]
            products = [b.fmul(value, w, flags=FUSED) for w in ws for value in xs]
            return [b.fadd(s, p, flags=FUSED) for s, p in zip(sums, products, strict=True)]

        def step(lanes: int) -> Callable[[ir.Value, list[Any]], list[ir.Value]]:
            def body(i: ir.Value, sums: list[Any]) -> list[ir.Value]:
                at = [address(b, row, i, size(stored)) for row in w_rows]
                return add_products(i, [widen(b, stored, a, lanes) for a in at], sums, lanes)

            return body

        def step_pairs(i: ir.Value, sums: list[Any]) -> list[ir.Value]:
            at = [address(b, row, i, 2) for row in w_rows]
            for a in at if rows == 1 else []:
                prefetch(b, b.add(a, ahead))
            halves = [widen_pairs(b, a) for a in at]
            sums = add_products(i, [even for even, _ in halves], sums, LANES)
            later = b.add(i, ir.Constant(I64, LANES))
            return add_products(later, [odd for _, odd in halves], sums, LANES)

        totals: list[Any] = [vector(F32, 0.0, LANES)] * (rows * cols)
        begin = number[0]
        if stored == types.uint16:
            ahead = b.mul(ldw, ir.Constant(I64, 2 * cols))  # bytes to the next tile's weights
            paired = b.and_(k, ir.Constant(I64, -2 * LANES))
            totals = loop(b, begin, paired, 2 * LANES, totals, step_pairs)
            begin = paired
        whole = b.and_(k, ir.Constant(I64, -LANES))
        totals = loop(b, begin, whole, LANES, totals, step(LANES))
        totals = [sum_lanes(b, s) for s in totals]
        totals = loop(b, whole, k, 1, totals, step(1))
        for n in range(cols):
            for m in range(rows):
                at = address(b, y, b.add(b.mul(number[m], ldy), number[n]), 4)
                before = b.load(b.inttoptr(at, F32.as_pointer()))
                before = b.select(first, ir.Constant(F32, 0.0), before)
                b.store(b.fadd(before, totals[n * rows + m]), b.inttoptr(at, F32.as_pointer()))

    return write


@intrinsic
def arrange(typingctx, kind, source, target, length):  # type: ignore[no-untyped-def]
    """Copy fp32 into the order in which weights of this `kind` meet them; target may be source.

    For bf16: of each whole 16, the even ones, then the odd ones. Two neighbouring weights are then
    widened by one shift and one mask, without a shuffle, which costs a third of the loads' time.
    """
    signature = types.void(kind, source, target, length)

    def write(b: ir.IRBuilder, source: Any, target: Any, length: Any) -> None:
        def split(i: ir.Value, _: list[Any]) -> list[ir.Value]:
            later = b.add(i, ir.Constant(I64, LANES))
            low, high = (
                widen(b, types.float32, address(b, source, at, 4), LANES) for at in (i, later)
            )
            for first, at in ((0, i), (1, later)):
                chosen = b.shuffle_vector(low, high, indices(range(first, 2 * LANES, 2)))
                store(b, chosen, target, at)
            return []

        def copy(i: ir.Value, _: list[Any]) -> list[ir.Value]:
            store(b, widen(b, types.float32, address(b, source, i, 4), 1), target, i)
            return []

        begin = ir.Constant(I64, 0)
        if kind == types.uint16:
            whole = b.and_(length, ir.Constant(I64, -2 * LANES))
            loop(b, begin, whole, 2 * LANES, [], split)
            begin = whole
        loop(b, begin, length, 1, [], copy)

    def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
        outlined(b, f"arrange_{kind}", args[1:], write)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def expand(typingctx, kind, source, target, length):  # type: ignore[no-untyped-def]
    """target = fp32 of `length` weights stored as `kind`, in the order of `arrange`."""
    signature = types.void(kind, source, target, length)

    def write(b: ir.IRBuilder, source: Any, target: Any, length: Any) -> None:
        def widen_both(i: ir.Value, _: list[Any]) -> list[ir.Value]:
            even, odd = widen_pairs(b, address(b, source, i, 2))
            store(b, even, target, i)
            store(b, odd, target, b.add(i, ir.Constant(I64, LANES)))
            return []

        def step(i: ir.Value, lanes: int) -> None:
            store(b, widen(b, kind, address(b, source, i, size(kind)), lanes), target, i)

        begin = ir.Constant(I64, 0)
        if kind == types.uint16:
            paired = b.and_(length, ir.Constant(I64, -2 * LANES))
            loop(b, begin, paired, 2 * LANES, [], widen_both)
            begin = paired
        each(b, length, step, begin)

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
