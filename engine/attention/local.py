"""Which form of attention reads a pool that one rank holds whole."""

from __future__ import annotations

from engine.attention.paged import PagedAttention
from engine.attention.tables import TableAttention
from kernels.dispatch import gpu_kernels
from kvcache.pool import KVPool


def local_attention(pool: KVPool) -> TableAttention | PagedAttention:
    """From page tables where the device has kernels for it; else the reference, which a CPU's
    kernels make fast."""
    return TableAttention(pool) if gpu_kernels(*pool.buffers()) else PagedAttention(pool)
