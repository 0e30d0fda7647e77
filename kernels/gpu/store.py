"""New tokens' rows into a cache, all parts of a row in one launch. The specification is
kernels.store_kv."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store(
    cache,  # [num_rows, first_width + second_width]
    rows,  # [N]
    tokens,  # [N]; read where HAS_TOKENS
    first,  # [T, first_width]
    second,  # [T, second_width]; read where second_width > 0
    first_width,
    second_width,
    cache_stride,
    first_stride,
    second_stride,
    HAS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + n).to(tl.int64) if HAS_TOKENS else n
    is_first = column < first_width
    is_second = (column >= first_width) & (column < first_width + second_width)
    a = tl.load(first + token * first_stride + column, mask=is_first, other=0.0)
    at = second + token * second_stride + column - first_width
    b = tl.load(at, mask=is_second, other=0.0)
    value = tl.where(is_first, a.to(cache.dtype.element_ty), b.to(cache.dtype.element_ty))
    target = cache + tl.load(rows + n).to(tl.int64) * cache_stride + column
    tl.store(target, value, mask=is_first | is_second)


def store_rows(
    cache: torch.Tensor,  # [rows, ...], each row contiguous
    rows: torch.Tensor,  # [N]
    tokens: torch.Tensor | None,  # [N]
    *parts: torch.Tensor,  # one or two, each [T, ...]
) -> None:
    if len(rows) == 0:
        return
    flat = [_rows_in_order(part) for part in parts]
    first, second = flat[0], flat[-1]
    width = first.shape[1]
    rest = second.shape[1] if len(flat) == 2 else 0
    block = min(2048, triton.next_power_of_2(width + rest))
    _store[(len(rows), triton.cdiv(width + rest, block))](
        cache, rows, rows if tokens is None else tokens, first, second, width, rest,
        cache.stride(0), first.stride(0), second.stride(0),
        HAS_TOKENS=tokens is not None, BLOCK=block, num_warps=max(1, min(4, block // 256)),
    )  # fmt: skip


def _rows_in_order(part: torch.Tensor) -> torch.Tensor:
    """[T, ...] -> [T, width] with adjacent elements, copied only where they are not."""
    if part.dim() == 3 and part.stride(1) == part.shape[2] and part.stride(2) == 1:
        return part.as_strided((len(part), part.shape[1] * part.shape[2]), (part.stride(0), 1))
    flat = part.reshape(len(part), -1)
    return flat if flat.stride(1) == 1 else flat.contiguous()
