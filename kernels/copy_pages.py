"""Copies whole pages between two arrays of pages, such as the layers of a device pool and those of
page-first objects in host memory."""

from __future__ import annotations

import torch

from kernels.dispatch import gpu_kernels


def copy_pages(
    target: torch.Tensor,  # [num_layers, num_target_pages, page_elements]
    target_pages: torch.Tensor,  # [N] int64, distinct
    source: torch.Tensor,  # [num_layers, num_source_pages, page_elements], of the same dtype
    source_pages: torch.Tensor,  # [N] int64
) -> None:
    """target[l, target_pages[i]] = source[l, source_pages[i]]; only the last dimension need be
    contiguous.

    Both on the CPU, or one on a CUDA device and the other there too or in pinned memory; the page
    lists are where the device is. On a device the copy is in order with its current stream.
    """
    if not (target.is_cuda or source.is_cuda):
        _copy_on_cpu(target, target_pages, source, source_pages)
        return
    if gpu_kernels(target if target.is_cuda else source, target_pages, source_pages):
        from kernels.gpu.copy_pages import copy_pages as launch

        launch(target, target_pages, source, source_pages)
        return
    pairs = list(zip(target_pages.tolist(), source_pages.tolist(), strict=True))
    for there, here in zip(target, source, strict=True):
        for to, at in pairs:
            there[to].copy_(here[at], non_blocking=True)


def _copy_on_cpu(
    target: torch.Tensor,
    target_pages: torch.Tensor,
    source: torch.Tensor,
    source_pages: torch.Tensor,
) -> None:
    """Page by page, as bytes: a page in one layer is contiguous and large. On this thread alone,
    which lets the interpreter go meanwhile: it runs beside a forward that has the others."""
    there, here = (t.view(torch.uint8).numpy() for t in (target, source))
    pairs = list(zip(target_pages.tolist(), source_pages.tolist(), strict=True))
    for layer in range(len(there)):
        for to, at in pairs:
            there[layer, to] = here[layer, at]
