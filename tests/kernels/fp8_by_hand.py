"""e4m3 and its scales from their definitions, a number at a time, for tests of those who compute
them faster."""

from __future__ import annotations

import math
from collections.abc import Sequence


def value_of(code: int) -> float:
    """OCP 8-bit floating point specification, table 2: bias 7, no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, digits = code >> 3 & 15, code & 7
    if exponent == 15 and digits == 7:
        return math.nan
    if exponent == 0:
        return sign * digits * 2.0**-9
    return sign * (8 + digits) * 2.0 ** (exponent - 10)


# Of the numbers from 0 up, by code.
VALUES = [value_of(code) for code in range(0x7F)]


def nearest(x: float) -> float:
    """The e4m3 number nearest to x, |x| <= 448; of two, the one with an even code."""
    code = min(range(len(VALUES)), key=lambda c: (abs(VALUES[c] - abs(x)), c % 2))
    return math.copysign(VALUES[code], x)


def scale_of(row: Sequence[float]) -> float:
    """The least power of two by which the row fits; no smaller than 1e-4's."""
    largest = max(1e-4, *(abs(x) for x in row))
    scale = 2.0**-40
    while largest > 448 * scale:
        scale *= 2
    return scale


def rounded(row: Sequence[float]) -> list[float]:
    """What a row is once it has been quantised."""
    scale = scale_of(row)
    return [scale * nearest(x / scale) for x in row]


# Rows of eight whose rounding is not obvious: ties, steps below the normal numbers, largest
# elements that are 448 times a power of two or next to it, zeros, and what is far too small.
HARD = [
    [1.75, 1.0, -0.5, 0.3, 2.0**-9, 2.0**-10, -3 * 2.0**-17, 0.0],
    [1.7500001, 1.0, -0.5, 0.3, 2.0**-9, 2.0**-17, 3 * 2.0**-18, -0.0],
    [448.0, 17.0, 19.0, -21.0, 2.0**-6, 2.0**-7, 7 * 2.0**-10, 15 * 2.0**-10],
    [-448.00003, 34.0, 38.0, 0.01, 0.011, -0.012, 1.0, 3.0],
    [0.0] * 8,
    [1e-5, -1e-6, 3e-9, 0.0, 1e-4, 9e-5, 1e-20, -1e-38],
    [3e38, -1e30, 1e36, 1.0, 0.0, 2e37, -2e38, 1e38],
    [1e-4, 1.25e-5, 1e-7, 2e-7, 5e-8, 4.5e-8, 0.0, 1e-9],
]
