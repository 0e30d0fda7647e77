"""New tokens' rows into the cache. The specification is kernels.store_kv."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.compiled import compiled
from kernels.cpu.tile import floats, integers


@compiled
def scatter(
    cache: int, row_stride: int, begin: int, rows: int, num_tokens: int, part: int, stride: int,
    width: int,
) -> None:  # fmt: skip
    """cache[rows[i], begin : begin + width] = part[i]"""
    to = integers(rows, num_tokens)
    for i in range(num_tokens):
        source = floats(part + 4 * i * stride, width)
        target = floats(cache + 4 * (to[i] * row_stride + begin), width)
        for j in range(width):
            target[j] = source[j]


def store_rows(cache: Tensor, rows: Tensor, *parts: Tensor) -> None:
    """As kernels.store_kv.store_rows, for fp32 2-d parts with contiguous rows."""
    begin = 0
    for part in parts:
        width = part.shape[1]
        scatter(
            cache.data_ptr(), cache.stride(0), begin, rows.data_ptr(), rows.shape[0],
            part.data_ptr(), part.stride(0), width,
        )  # fmt: skip
        begin += width
