"""Products of fp32 rows with weights kept in bf16, fp16 or fp32, on the CPU's threads.

For few rows the weights are widened in registers: the product of one then runs at the speed of
memory. For many, four weight rows at a time are widened into a panel that stays in the first cache
while the rows of x, a chunk that fits the second cache, pass by in fours.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.compiled import compiled, compiled_parallel, prange
from kernels.cpu.norm import rms_norm_rows
from kernels.cpu.tile import FP32, arrange, expand, tile

K_BLOCK = 1024  # columns per panel: 16 KiB
PANEL_FLOATS = 4 * (K_BLOCK + 16)
CHUNK_FLOATS = 56 * 1024  # of x per chunk: 224 KiB
PANEL_ROWS = 12  # fewer rows of x share no panel


@compiled
def arrange_rows(kind: Any, x: int, ldx: int, num_rows: int, k: int, out: int) -> None:
    """out [num_rows, k], contiguous, = x in the order that `multiply` wants for this kind."""
    for m in range(num_rows):
        arrange(kind, x + 4 * m * ldx, out + 4 * m * k, k)


@compiled
def strip(
    kind: Any, size: int, wide: bool, x: int, ldx: int, num_rows: int, w: int, ldw: int, k: int,
    y: int, ldy: int, first: bool,
) -> None:  # fmt: skip
    """All rows of x [num_rows, k] against 4 weight rows (1 unless `wide`)."""
    m = 0
    while wide and m + 4 <= num_rows:
        x_at, y_at = x + 4 * m * ldx, y + 4 * m * ldy
        tile(4, 2, kind, x_at, ldx, w, ldw, k, y_at, ldy, first)
        w_at = w + size * 2 * ldw
        tile(4, 2, kind, x_at, ldx, w_at, ldw, k, y_at + 8, ldy, first)
        m += 4
    if wide and num_rows - m >= 2:
        tile(2, 4, kind, x + 4 * m * ldx, ldx, w, ldw, k, y + 4 * m * ldy, ldy, first)
        m += 2
    while m < num_rows:
        if wide:
            tile(1, 4, kind, x + 4 * m * ldx, ldx, w, ldw, k, y + 4 * m * ldy, ldy, first)
        else:
            tile(1, 1, kind, x + 4 * m * ldx, ldx, w, ldw, k, y + 4 * m * ldy, ldy, first)
        m += 1


@compiled
def multiply(
    kind: Any, size: int, x: int, ldx: int, num_rows: int, w: int, ldw: int, num_cols: int, k: int,
    y: int, ldy: int, fresh: int, panel: int,
) -> None:  # fmt: skip
    """y[:num_rows, :num_cols] = (fresh ? 0 : y) + x [num_rows, k] · w [num_cols, k]ᵀ by the calling
    thread; x as `arrange_rows` leaves it.

    `size` is a weight's bytes; `panel` has room for PANEL_FLOATS. The order in which a row's
    products are added depends on k alone.
    """
    num_blocks = (k + K_BLOCK - 1) // K_BLOCK
    k_block = ((k + num_blocks - 1) // num_blocks + 15) // 16 * 16
    chunk = max(24, CHUNK_FLOATS // k // 4 * 4)
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
                first = fresh != 0 and k0 == 0
                if rows < PANEL_ROWS or size == 4:
                    strip(kind, size, wide, x_at, ldx, rows, w_at, ldw, length, y_at, ldy, first)
                else:
                    for j in range(4 if wide else 1):
                        expand(kind, w_at + size * j * ldw, panel + 4 * j * k_block, length)
                    strip(FP32, 4, wide, x_at, ldx, rows, panel, k_block, length, y_at, ldy, first)
            n += 4 if wide else 1


@compiled
def share(total: int, part: int, num_parts: int, unit: int) -> tuple[int, int]:
    """The part's [from, to) of `total` columns, in whole units."""
    units = (total + unit - 1) // unit
    return (
        min(total, units * part // num_parts * unit),
        min(total, units * (part + 1) // num_parts * unit),
    )


@compiled_parallel
def linear(
    kind: Any, size: int, x: int, ldx: int, num_rows: int, norm: int, eps: float, normed: int,
    w: int, ldw: int, num_cols: int, k: int, y: int, fresh: int, work: int, num_threads: int,
) -> None:  # fmt: skip
    """y [num_rows, num_cols], contiguous, = (fresh ? 0 : y) + x · wᵀ.

    Where `norm` is an address, rms_norm(x) takes x's place and is also written to `normed`
    [num_rows, k]. `work` has room for num_threads * PANEL_FLOATS + num_rows * k fp32.
    """
    rows = work + 4 * num_threads * PANEL_FLOATS
    if norm != 0:
        rms_norm_rows(x, ldx, num_rows, k, norm, eps, normed)
        arrange_rows(kind, normed, k, num_rows, k, rows)
    else:
        arrange_rows(kind, x, ldx, num_rows, k, rows)
    for part in prange(num_threads):
        low, high = share(num_cols, part, num_threads, 4)
        multiply(
            kind, size, rows, k, num_rows, w + size * low * ldw, ldw, high - low, k, y + 4 * low,
            num_cols, fresh, work + 4 * PANEL_FLOATS * part,
        )  # fmt: skip
