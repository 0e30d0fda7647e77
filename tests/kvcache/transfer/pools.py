"""Pools with random contents, for tests of transfers."""

from __future__ import annotations

import torch

from kvcache.layout import KVGeometry
from kvcache.pool import KVPool

PAGE = 4
DSA = KVGeometry(num_layers=3, latent_dim=10, index_dim=6, index_layers=(0, 2))
MLA = KVGeometry(num_layers=2, latent_dim=9)
GQA = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=4)
FP8 = KVGeometry(
    num_layers=3, latent_dim=10, index_dim=16, index_layers=(0, 2), fp8_index_keys=True
)
GEOMETRIES = {"latent+index": DSA, "latent+fp8 index": FP8, "latent": MLA, "gqa": GQA}


def random_pool(
    geometry: KVGeometry, num_pages: int, seed: int, *, size: int = 1, rank: int = 0
) -> KVPool:
    pool = KVPool.create(geometry, PAGE, num_pages, torch.bfloat16, cp_size=size, cp_rank=rank)
    randomise(pool, torch.Generator().manual_seed(1000 * seed + rank))
    return pool


def randomise(pool: KVPool, generator: torch.Generator | None = None) -> None:
    """`generator`: one of the pool's device."""
    for buffer in pool.buffers():
        if buffer.dtype == torch.uint8:
            buffer.random_(generator=generator)
        else:
            buffer.normal_(generator=generator)


def poison(pool: KVPool) -> None:
    """Nothing in it is a number; of index keys in fp8 neither elements nor scales are."""
    for buffer in pool.buffers():
        buffer.fill_(0xFF if buffer.dtype == torch.uint8 else torch.nan)


def page(pool: KVPool, row_page: int) -> torch.Tensor:
    """All bytes of a row page, by plain indexing."""
    rows = slice(row_page * PAGE, (row_page + 1) * PAGE)
    return torch.cat([buffer[:, rows].flatten().view(torch.uint8) for buffer in pool.buffers()])


def contents(pool: KVPool) -> list[bytes]:
    """The bytes of every row page, by number."""
    return [page(pool, row_page).numpy().tobytes() for row_page in range(pool.num_pages + 1)]
