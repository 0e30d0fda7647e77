"""A page's fingerprint, to check that what arrived is what was sent. For tests and checks."""

from __future__ import annotations

import hashlib

import torch

from kvcache.pool import KVPool


def page_digest(pool: KVPool, row_page: int) -> str:
    """sha256 over the bytes of one row page in all buffers and layers, in the record's order."""
    if not 0 <= row_page <= pool.num_pages:
        raise ValueError(f"row page must be in 0 to {pool.num_pages}, got {row_page}")
    first = row_page * pool.page_size
    digest = hashlib.sha256()
    for buffer in pool.buffers():
        rows = buffer[:, first : first + pool.page_size].contiguous().cpu()
        digest.update(rows.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
