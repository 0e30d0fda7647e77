"""Products of fp32 rows with weights kept in bf16, fp16 or fp32, on the CPU's threads.

For one to three rows the weights are widened in registers: the product then runs at the speed of
memory. For more, four weight rows at a time are widened into a panel that stays in the first cache
while the rows of x, a chunk that fits the second cache, pass by in threes.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.compiled import compiled, compiled_parallel, prange
from kernels.cpu.tile import FP32, expand, tile

K_BLOCK = 1024  # columns per panel: 16 KiB
PANEL_FLOATS = 4 * (K_BLOCK + 8)
CHUNK_FLOATS = 56 * 1024  # of x per chunk: 224 KiB
IN_REGISTERS = 3  # up to so many rows of x no panel is made


@compiled
def strip(
    kind: Any, wide: bool, x: int, ldx: int, num_rows: int, w: int, ldw: int, k: int, y: int,
    ldy: int, first: bool,
) -> None:  # fmt: skip
    """All rows of x [num_rows, k] against 4 weight rows (1 unless `wide`)."""
    m = 0
    if not wide:
        while m < num_rows:
            tile(1, 1, kind, x + 4 * m * ldx, ldx, w, ldw, k, y + 4 * m * ldy, ldy, first)
            m += 1
        return
    while m + 3 <= num_rows:
        tile(3, 4, kind, x + 4 * m * ldx, ldx, w, ldw, k, y + 4 * m * ldy, ldy, first)
        m += 3
    if num_rows - m == 2:
        tile(2, 4, kind, x + 4 * m * ldx, ldx, w, ldw, k, y + 4 * m * ldy, ldy, first)
    elif num_rows - m == 1:
        tile(1, 4, kind, x + 4 * m * ldx, ldx, w, ldw, k, y + 4 * m * ldy, ldy, first)


@compiled
def multiply(
    kind: Any, size: int, x: int, ldx: int, num_rows: int, w: int, ldw: int, num_cols: int, k: int,
    y: int, ldy: int, panel: int,
) -> None:  # fmt: skip
    """y[:num_rows, :num_cols] = x [num_rows, k] · w [num_cols, k]ᵀ by the calling thread.

    `size` is a weight's bytes; `panel` has room for PANEL_FLOATS. The order in which a row's
    products are added depends on k alone.
    """
    num_blocks = (k + K_BLOCK - 1) // K_BLOCK
    k_block = ((k + num_blocks - 1) // num_blocks + 7) // 8 * 8
    chunk = max(24, CHUNK_FLOATS // k // 3 * 3)
    for m in range(0, num_rows, chunk):
        rows = min(chunk, num_rows - m)
        n = 0
        while n < num_cols:
            wide = n + 4 <= num_cols
            for k0 in range(0, k, k_block):
                length = min(k_block, k - k0)
                w_at = w + size * (n * ldw + k0)
                x_at = x + 4 * (m * ldx + k0)
                y_at = y + 4 * (m * ldy + n)
                if rows <= IN_REGISTERS or size == 4:
                    strip(kind, wide, x_at, ldx, rows, w_at, ldw, length, y_at, ldy, k0 == 0)
                else:
                    for j in range(4 if wide else 1):
                        expand(kind, w_at + size * j * ldw, panel + 4 * j * k_block, length)
                    strip(FP32, wide, x_at, ldx, rows, panel, k_block, length, y_at, ldy, k0 == 0)
            n += 4 if wide else 1


@compiled
def share(total: int, part: int, num_parts: int) -> tuple[int, int]:
    """The part's [from, to) of `total` columns, in whole groups of four."""
    groups = (total + 3) // 4
    return (
        min(total, groups * part // num_parts * 4),
        min(total, groups * (part + 1) // num_parts * 4),
    )


@compiled_parallel
def linear(
    kind: Any, size: int, x: int, ldx: int, num_rows: int, w: int, ldw: int, num_cols: int, k: int,
    y: int, panels: int, num_threads: int,
) -> None:  # fmt: skip
    """y [num_rows, num_cols], contiguous, = x · wᵀ. `panels`: PANEL_FLOATS for each thread."""
    for part in prange(num_threads):
        low, high = share(num_cols, part, num_threads)
        multiply(
            kind, size, x, ldx, num_rows, w + size * low * ldw, ldw, high - low, k, y + 4 * low,
            num_cols, panels + 4 * PANEL_FLOATS * part,
        )  # fmt: skip
