"""Pages between device memory and pinned host memory, which the kernel addresses directly: no
staging, and scattered pages cost what contiguous ones do. The specification is kernels.copy_pages.

A link to the host is slow and far away: what fills it is bytes under way, not multiprocessors. So
few programs, of many threads each, walk all blocks in turn, and the others stay free for the
forward that runs meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a copy is cut: `num_programs` at once, each over `block_bytes` at a time."""

    num_programs: int
    block_bytes: int
    num_warps: int


SHAPE = Shape(num_programs=8, block_bytes=65536, num_warps=32)
_ON_DEVICE = Shape(num_programs=528, block_bytes=32768, num_warps=8)


@triton.jit(do_not_specialize=["num_tasks"])
def _copy(
    target, source, target_pages, source_pages,
    target_layer, source_layer, target_page, source_page,  # strides, in words
    num_words,  # of a page in one layer
    num_layers, num_tasks,  # a task is one block of one page in one layer
    BLOCK: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num_words, BLOCK)
    task = tl.program_id(0)
    while task < num_tasks:
        # Blocks follow each other as they lie in a page-first object.
        row = task // num_blocks
        i = row // num_layers
        layer = (row % num_layers).to(tl.int64)
        words = (task % num_blocks) * BLOCK + tl.arange(0, BLOCK)
        to = tl.load(target_pages + i) * target_page + layer * target_layer
        at = tl.load(source_pages + i) * source_page + layer * source_layer
        inside = words < num_words
        tl.store(target + to + words, tl.load(source + at + words, mask=inside), mask=inside)
        task += tl.num_programs(0)


def copy_pages(
    target: torch.Tensor,
    target_pages: torch.Tensor,
    source: torch.Tensor,
    source_pages: torch.Tensor,
    shape: Shape | None = None,  # None: by where the two are
) -> None:
    """As kernels.copy_pages.copy_pages, for CUDA."""
    if shape is None:
        shape = _ON_DEVICE if target.is_cuda and source.is_cuda else SHAPE
    target, source = _as_words(target, source)
    num_layers, num_words = len(target), target.shape[2]
    block = shape.block_bytes // target.itemsize
    num_tasks = len(target_pages) * num_layers * triton.cdiv(num_words, block)
    if not num_tasks:
        return
    _copy[(min(shape.num_programs, num_tasks),)](
        target, source, target_pages, source_pages,
        target.stride(0), source.stride(0), target.stride(1), source.stride(1),
        num_words, num_layers, num_tasks, BLOCK=block, num_warps=shape.num_warps,
    )  # fmt: skip


def _as_words(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the largest words that their places and sizes are multiples of."""
    numbers = [target.data_ptr(), source.data_ptr(), target.shape[2] * target.itemsize]
    numbers += [s * t.itemsize for t in (target, source) for s in t.stride()[:2]]
    word = next(w for w in _WORDS if all(n % w.itemsize == 0 for n in numbers))
    return target.view(word), source.view(word)
