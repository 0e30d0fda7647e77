"""Pages between device memory and pinned host memory, which the kernel addresses directly: no
staging, and scattered pages cost what contiguous ones do. The specification is kernels.copy_pages.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # words of one program
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _program(
    target: Any, source: Any, target_pages: Any, source_pages: Any,
    target_layer: Any, source_layer: Any, target_page: Any, source_page: Any,  # strides, in words
    num_words: Any,  # of a page in one layer
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.program_id(0)
    layer = tl.program_id(2).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(target_pages + i) * target_page + layer * target_layer
    at = tl.load(source_pages + i) * source_page + layer * source_layer
    inside = words < num_words
    tl.store(target + to + words, tl.load(source + at + words, mask=inside), mask=inside)


_copy = triton.jit(_program)


def copy_pages(
    target: torch.Tensor,
    target_pages: torch.Tensor,
    source: torch.Tensor,
    source_pages: torch.Tensor,
) -> None:
    """As kernels.copy_pages.copy_pages, for CUDA."""
    target, source = _as_words(target, source)
    num_words = target.shape[2]
    grid = (len(target_pages), triton.cdiv(num_words, _BLOCK), len(target))
    _copy[grid](
        target, source, target_pages, source_pages,
        target.stride(0), source.stride(0), target.stride(1), source.stride(1),
        num_words, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def _as_words(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the largest words that their places and sizes are multiples of."""
    numbers = [target.data_ptr(), source.data_ptr(), target.shape[2] * target.itemsize]
    numbers += [s * t.itemsize for t in (target, source) for s in t.stride()[:2]]
    word = next(w for w in _WORDS if all(n % w.itemsize == 0 for n in numbers))
    return target.view(word), source.view(word)
