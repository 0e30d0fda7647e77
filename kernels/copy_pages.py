"""Copies whole pages between two arrays of pages, such as a layer of the device pool and the same
layer's part of page-first objects in host memory."""

from __future__ import annotations

import torch


def copy_pages(
    target: torch.Tensor,  # [num_target_pages, page_elements], rows may be strided
    target_pages: torch.Tensor,  # [N] int64 on the CPU, distinct
    source: torch.Tensor,  # [num_source_pages, page_elements], of the same dtype
    source_pages: torch.Tensor,  # [N] int64 on the CPU
) -> None:
    """target[target_pages[i]] = source[source_pages[i]], on the CPU."""
    target.index_copy_(0, target_pages, source.index_select(0, source_pages))
