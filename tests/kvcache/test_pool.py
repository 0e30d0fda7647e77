"""The pool: which rows a token reaches on each rank, and what its numbers say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.layout import KVGeometry
from kvcache.pool import KVPool

PAGE = 4
MLA = KVGeometry(num_layers=3, latent_dim=7, index_dim=5, index_layers=(0, 2))
GQA = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=3)


def poisoned(geometry: KVGeometry, num_pages: int = 6, rank: int = 0, size: int = 1) -> KVPool:
    pool = KVPool.create(geometry, PAGE, num_pages, torch.float32, cp_size=size, cp_rank=rank)
    for buffer in pool.buffers():
        buffer.fill_(torch.nan)
    return pool


def test_one_rank_writes_every_token_and_nothing_else() -> None:
    pool = poisoned(MLA)
    locs = torch.tensor([9, 4, 22])
    to = pool.destination(locs)
    latent, k_pe, key = torch.rand(3, 4), torch.rand(3, 3), torch.rand(3, 5)
    pool.store_latent(1, to, latent, k_pe)
    pool.store_index_key(2, to, key)
    rows = pool.rows(locs)
    assert torch.equal(pool.latent(1)[rows], torch.cat((latent, k_pe), dim=1))
    assert torch.equal(pool.index_keys(2)[rows], key)
    assert int((~pool.latent(1).isnan()).any(1).sum()) == 3
    for untouched in (pool.latent(0), pool.latent(2), pool.index_keys(0)):
        assert bool(untouched.isnan().all())


def test_keys_and_values() -> None:
    pool = poisoned(GQA)
    locs = torch.tensor([5, 6])
    k, v = torch.rand(2, 2, 3), torch.rand(2, 2, 3)
    pool.store_kv(1, pool.destination(locs), k, v)
    assert torch.equal(pool.keys(1)[pool.rows(locs)], k)
    assert torch.equal(pool.values(1)[pool.rows(locs)], v)
    assert bool(pool.keys(0).isnan().all())


@given(
    size=st.integers(1, 5),
    locs=st.lists(st.integers(PAGE, 7 * PAGE - 1), unique=True, min_size=1),
)
def test_the_ranks_share_the_tokens_out(size: int, locs: list[int]) -> None:
    """Every loc is written by exactly one rank; a rank without one writes nothing."""
    latent = torch.arange(len(locs) * 4.0).view(-1, 4)
    k_pe = -torch.arange(len(locs) * 3.0).view(-1, 3)
    found = []
    for rank in range(size):
        pool = poisoned(MLA, rank=rank, size=size)
        pool.store_latent(0, pool.destination(torch.tensor(locs)), latent, k_pe)
        written = pool.latent(0)[~pool.latent(0).isnan().any(1)]
        assert bool(pool.latent(0)[:PAGE].isnan().all())  # nobody owns the dummy page
        found.append(written)
    union = torch.cat(found)
    assert len(union) == len(locs)
    assert sorted(union.tolist()) == sorted(torch.cat((latent, k_pe), dim=1).tolist())


def test_padding_goes_to_the_dummy_page() -> None:
    pool = poisoned(MLA)
    pool.store_latent(0, pool.destination(torch.tensor([0, 0])), torch.ones(2, 4), torch.ones(2, 3))
    assert bool(pool.latent(0)[PAGE:].isnan().all())


def test_values_are_cast_to_the_cache() -> None:
    pool = KVPool.create(MLA, PAGE, 2, torch.bfloat16)
    to = pool.destination(torch.tensor([4]))
    pool.store_latent(0, to, torch.full((1, 4), 1.001), torch.ones(1, 3))
    assert pool.latent(0)[4].tolist() == [1.0] * 7


def test_capacity_is_logical() -> None:
    pool = poisoned(MLA, num_pages=6, size=4)
    assert (pool.logical_pages, pool.logical_tokens) == (24, 96)
    # 7 rows pages of 4 tokens, 3 layers of 7 and 2 of 5 floats
    assert pool.num_bytes == 7 * 4 * (3 * 7 + 2 * 5) * 4
    assert KVPool.page_bytes(MLA, PAGE, torch.bfloat16) == 4 * 31 * 2


def test_bytes_of_a_rank_do_not_depend_on_the_group() -> None:
    assert poisoned(GQA, size=1).num_bytes == poisoned(GQA, size=4).num_bytes


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"layer 1 has no indexer; layers with one: \(0, 2\)"):
        poisoned(MLA).index_keys(1)
    with pytest.raises(ValueError, match="num_pages must be positive, got 0"):
        KVPool.create(MLA, PAGE, 0, torch.float32)
