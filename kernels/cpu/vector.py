"""Vector code for the CPU kernels, written as LLVM IR: loads that widen, loops, sums, silu.

These functions build code inside a numba intrinsic and run only while a kernel is compiled.
Addresses are integers in bytes, indices and strides are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 8  # one AVX2 register, two NEON ones
I64, F32 = ir.IntType(64), ir.FloatType()
# 2**part = sum of (part ln 2)**i / i!, highest power first
_EXP2_SERIES = [math.log(2) ** i / math.factorial(i) for i in range(7, -1, -1)]
_ROUNDING = 1.5 * 2**23  # adding and taking it away again rounds an fp32 to an integer
FUSED = ("contract",)  # one rounding per multiply-add where the machine has one


def outlined(
    b: ir.IRBuilder, name: str, args: Sequence[ir.Value], write: Callable[..., None]
) -> None:
    """Call a function of its own, written once per module: inlined copies of these bodies would
    multiply the time to compile every kernel that uses them."""
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    function = cgutils.get_or_insert_function(b.module, kind, f"plait_{name}")
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        write(inner, *function.args)
        inner.ret_void()
    b.call(function, args)


def address(b: ir.IRBuilder, base: ir.Value, index: ir.Value, size: int) -> ir.Value:
    return b.add(base, b.mul(index, ir.Constant(I64, size)))


def widen(b: ir.IRBuilder, kind: Any, address: ir.Value, lanes: int) -> ir.Value:
    """Load `lanes` weights stored as `kind` and turn them into fp32 (a scalar where lanes is 1)."""

    def of(t: ir.Type) -> ir.Type:
        return t if lanes == 1 else ir.VectorType(t, lanes)

    stored = {types.uint16: ir.IntType(16), types.int16: ir.HalfType(), types.float32: F32}[kind]
    raw = b.load(b.inttoptr(address, of(stored).as_pointer()), align=size(kind))
    if kind == types.float32:
        return raw
    if kind == types.int16:
        return b.fpext(raw, of(F32))
    wide = of(ir.IntType(32))
    sixteen = ir.Constant(wide, 16 if lanes == 1 else [16] * lanes)
    return b.bitcast(b.shl(b.zext(raw, wide), sixteen), of(F32))


def widen_pairs(b: ir.IRBuilder, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Load 2 * LANES bf16 weights: the even ones and the odd ones as fp32."""
    wide = ir.VectorType(ir.IntType(32), LANES)
    raw = b.load(b.inttoptr(address, wide.as_pointer()), align=2)
    even = b.shl(raw, vector(ir.IntType(32), 16, LANES))
    odd = b.and_(raw, vector(ir.IntType(32), -0x10000, LANES))
    floats = ir.VectorType(F32, LANES)
    return b.bitcast(even, floats), b.bitcast(odd, floats)


def prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line of an address, which need not exist, to be read."""
    i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    for_reading, keep, data = (ir.Constant(i32, value) for value in (0, 3, 1))
    b.call(function, [b.inttoptr(address, pointer), for_reading, keep, data])


def size(kind: Any) -> int:
    return 4 if kind == types.float32 else 2


def loop(
    b: ir.IRBuilder,
    start: ir.Value,
    stop: ir.Value,
    step: int,
    carried: list[ir.Value],
    body: Callable[[ir.Value, list[Any]], list[ir.Value]],
) -> list[Any]:
    """for (i = start; i < stop; i += step) carried = body(i, carried)"""
    entry = b.block
    head, inner, done = (b.append_basic_block(name) for name in ("head", "inner", "done"))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    i.add_incoming(start, entry)
    phis = [b.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, entry)
    b.cbranch(b.icmp_signed("<", i, stop), inner, done)
    b.position_at_end(inner)
    results = body(i, phis)
    i.add_incoming(b.add(i, ir.Constant(I64, step)), b.block)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(done)
    return phis


def each(
    b: ir.IRBuilder,
    count: ir.Value,
    step: Callable[[ir.Value, int], None],
    begin: ir.Value | None = None,  # a multiple of LANES; 0 where it is not given
) -> None:
    """step(i, lanes) over begin <= i < count, whole vectors first, then single elements."""

    def body(lanes: int) -> Callable[[ir.Value, list[Any]], list[ir.Value]]:
        def run(i: ir.Value, _: list[Any]) -> list[ir.Value]:
            step(i, lanes)
            return []

        return run

    whole = b.and_(count, ir.Constant(I64, -LANES))
    loop(b, ir.Constant(I64, 0) if begin is None else begin, whole, LANES, [], body(LANES))
    loop(b, whole, count, 1, [], body(1))


def store(b: ir.IRBuilder, value: ir.Value, base: ir.Value, index: ir.Value) -> None:
    at = b.inttoptr(address(b, base, index, 4), value.type.as_pointer())
    b.store(value, at, align=4)


def sum_lanes(b: ir.IRBuilder, v: ir.Value) -> ir.Value:
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            b.shuffle_vector(v, v, indices(range(start, start + width))) for start in (0, width)
        )
        v = b.fadd(low, high)
    return b.extract_element(v, ir.Constant(ir.IntType(32), 0))


def indices(values: range) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(values)), list(values))


def silu(b: ir.IRBuilder, x: ir.Value, lanes: int) -> ir.Value:
    """x / (1 + e**-x), e**-x as 2**whole * 2**part, the latter by its Taylor series (|part| <= ½,
    8 terms: 5e-9)."""

    def of(value: float, t: ir.Type = F32) -> ir.Constant:
        return ir.Constant(t, value) if lanes == 1 else vector(t, value, lanes)

    power = b.fmul(x, of(-1 / math.log(2)))
    for limit, beyond in ((126.0, ">"), (-126.0, "<")):
        power = b.select(b.fcmp_ordered(beyond, power, of(limit)), of(limit), power)
    whole = b.fsub(b.fadd(power, of(_ROUNDING)), of(_ROUNDING))
    part = b.fsub(power, whole)
    series = of(_EXP2_SERIES[0])
    for coefficient in _EXP2_SERIES[1:]:
        series = b.fadd(b.fmul(series, part, flags=FUSED), of(coefficient), flags=FUSED)
    i32 = ir.IntType(32)
    integer = i32 if lanes == 1 else ir.VectorType(i32, lanes)
    biased = b.add(b.fptosi(whole, integer), of(127, i32))
    scale = b.bitcast(b.shl(biased, of(23, i32)), x.type)
    return b.fdiv(x, b.fadd(of(1.0), b.fmul(series, scale)))


def vector(t: ir.Type, value: float, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(t, lanes), [value] * lanes)


def spread(b: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    one = b.insert_element(empty, scalar, ir.Constant(ir.IntType(32), 0))
    return b.shuffle_vector(one, one, vector(ir.IntType(32), 0, lanes))
