"""The pool: which rows a token reaches on each rank, and what its numbers say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.layout import KVGeometry
from kvcache.pool import KVPool
from tests.kernels.fp8_by_hand import rounded
from tests.kvcache.transfer.pools import poison

PAGE = 4
MLA = KVGeometry(num_layers=3, latent_dim=7, index_dim=5, index_layers=(0, 2))
FP8 = KVGeometry(num_layers=3, latent_dim=7, index_dim=16, index_layers=(0, 2), fp8_index_keys=True)
GQA = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=3)


def poisoned(geometry: KVGeometry, num_pages: int = 6, rank: int = 0, size: int = 1) -> KVPool:
    pool = KVPool.create(geometry, PAGE, num_pages, torch.float32, cp_size=size, cp_rank=rank)
    poison(pool)
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


def test_index_keys_in_fp8_take_a_byte_an_element_and_a_scale_a_row() -> None:
    pool = poisoned(FP8)
    assert pool.num_bytes == 7 * 4 * (3 * 7 * 4 + 2 * (16 + 4))
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        assert KVPool.page_bytes(FP8, PAGE, dtype) == 4 * (3 * 7 * size + 2 * 20)
    by_name = {b.name: (b.dtype, b.page_bytes) for b in pool.record().buffers}
    assert by_name == {"latent": ("float32", 112), "index_keys": ("float8_e4m3fn", 80)}


@pytest.mark.parametrize("size", [1, 3])
def test_index_keys_in_fp8_go_where_their_tokens_do(size: int) -> None:
    """As they come or quantised before, by whoever owns the page; the others keep what they had."""
    torch.manual_seed(1)
    locs, keys = torch.tensor([9, 4, 22, 27, 12]), torch.randn(5, 16)
    owners = (locs // PAGE - 1) % size
    for rank in range(size):
        for is_packed in (False, True):
            pool = poisoned(FP8, rank=rank, size=size)
            source = pool.unpack_index_keys(pool.pack_index_keys(keys)) if is_packed else keys
            pool.store_index_key(2, pool.destination(locs), source)
            own = owners == rank
            found = pool.index_keys(2)[pool.rows(locs[own])].dequantised()
            assert found.double().tolist() == [rounded(row) for row in keys[own].tolist()]
            left = pool.index_keys(2).dequantised().isnan().all(1)
            assert int((~left).sum()) == int(own.sum())
            assert bool(pool.index_keys(0).dequantised().isnan().all())


@pytest.mark.parametrize("geometry", [MLA, FP8, GQA])
def test_pages_are_read_whole(geometry: KVGeometry) -> None:
    """In any order, into a workspace that was something else's before."""
    pool = poisoned(geometry)
    locs = torch.arange(PAGE, 7 * PAGE)
    to, num = pool.destination(locs), len(locs)
    workspace = pool.new_workspace(4096).fill_(0xFF)
    pages = torch.tensor([5, 2, 2])
    where = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    if geometry is GQA:
        k, v = torch.rand(num, 2, 3), torch.rand(num, 2, 3)
        pool.store_kv(1, to, k, v)
        out = pool.pages_in("kv", workspace, 3)
        pool.read_pages("kv", 1, pages, out)
        assert torch.equal(out.view(-1, 2, 2, 3)[:, 0], pool.keys(1)[where])
        assert torch.equal(out.view(-1, 2, 2, 3)[:, 1], pool.values(1)[where])
        return
    pool.store_latent(1, to, torch.rand(num, 4), torch.rand(num, 3))
    out = pool.pages_in("latent", workspace, 3)
    pool.read_pages("latent", 1, pages, out)
    assert torch.equal(out.flatten(0, 1), pool.latent(1)[where])
    pool.store_index_key(2, to, torch.randn(num, geometry.index_dim))
    out = pool.pages_in("index_keys", workspace, 3)
    pool.read_pages("index_keys", 2, pages, out)
    found, want = pool.index_rows(out), pool.index_keys(2)[where]
    if geometry is FP8:
        found, want = found.dequantised(), want.dequantised()
    assert torch.equal(found, want) and not bool(want.isnan().any())


def test_bytes_of_a_rank_do_not_depend_on_the_group() -> None:
    assert poisoned(GQA, size=1).num_bytes == poisoned(GQA, size=4).num_bytes


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"layer 1 has no indexer; layers with one: \(0, 2\)"):
        poisoned(MLA).index_keys(1)
    with pytest.raises(ValueError, match="index_dim 20: keys in fp8 need a multiple of 16"):
        KVGeometry(num_layers=1, latent_dim=4, index_dim=20, index_layers=(0,), fp8_index_keys=True)
    with pytest.raises(ValueError, match="num_pages must be positive, got 0"):
        KVPool.create(MLA, PAGE, 0, torch.float32)
