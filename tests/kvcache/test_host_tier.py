"""One rank's host pool: which bytes go where, layer by layer, and who is told when."""

from __future__ import annotations

import threading

import pytest
import torch

from kvcache.host_copies import ThreadCopier
from kvcache.host_plan import Backup, LoadBack
from kvcache.host_tier import HostTier
from kvcache.layout import KVGeometry
from kvcache.pool import KVPool
from tests.kvcache.host_group import ManualCopier
from tests.kvcache.transfer.pools import GEOMETRIES, PAGE, contents, page, poison, random_pool

DSA = GEOMETRIES["latent+index"]


def manual(pool: KVPool, num_pages: int) -> tuple[HostTier, ManualCopier]:
    copier = ManualCopier()
    return HostTier(pool, num_pages, copier), copier


@pytest.mark.parametrize("staged_pages", [0, 1, 2, 5])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_pages_come_back_as_they_were_and_no_other_changes(
    geometry: KVGeometry, staged_pages: int
) -> None:
    pool = random_pool(geometry, 6, seed=1)
    copier = ManualCopier()
    tier = HostTier(pool, 9, copier, staged_pages=staged_pages)
    before = contents(pool)
    tier.start(Backup(id=1, device_pages=[2, 5, 3], host_pages=[9, 1, 4]))
    copier.close()
    assert tier.poll() == [1]
    for device, host in ((2, 9), (5, 1), (3, 4)):
        assert tier.object(host).numpy().tobytes() == before[device]  # one object, all layers
    poison(pool)
    poisoned = contents(pool)
    tier.start(LoadBack(id=2, host_pages=[4, 9, 1], device_pages=[6, 1, 2]))
    copier.close()
    assert tier.poll() == [2]
    assert tier.poll() == []
    after = contents(pool)
    assert [after[i] for i in (6, 1, 2)] == [before[3], before[2], before[5]]
    assert [after[i] for i in (0, 3, 4, 5)] == [poisoned[i] for i in (0, 3, 4, 5)]
    assert tier.num_bytes == {"backup": 3 * tier.page_bytes, "load_back": 3 * tier.page_bytes}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_page_on_the_host_is_as_large_as_on_the_device(geometry: KVGeometry) -> None:
    pool = random_pool(geometry, 3, seed=1)
    tier, _ = manual(pool, 5)
    assert tier.page_bytes == KVPool.page_bytes(geometry, PAGE, torch.bfloat16)
    assert tier.total_bytes == 6 * tier.page_bytes


def test_waiting_for_a_layer_brings_its_latent_rows_and_its_index_keys_and_no_more() -> None:
    pool = random_pool(DSA, 4, seed=1)
    tier, copier = manual(pool, 4)
    tier.start(Backup(id=1, device_pages=[3], host_pages=[2]))
    copier.close()
    want = [buffer.clone() for buffer in pool.buffers()]
    latent, index_keys = pool.buffers()
    for buffer in (latent, index_keys):
        buffer.fill_(torch.nan)
    tier.start(LoadBack(id=2, host_pages=[2], device_pages=[1]))
    source, rows = slice(3 * PAGE, 4 * PAGE), slice(PAGE, 2 * PAGE)
    slots = {0: 0, 2: 1}  # of the layers with an indexer
    for layer in range(3):
        tier.wait_layer(layer)
        for other in range(3):
            is_there = other <= layer
            assert torch.equal(latent[other, rows], want[0][other, source]) == is_there
            if other in slots:
                slot = slots[other]
                assert torch.equal(index_keys[slot, rows], want[1][slot, source]) == is_there
    assert sorted(tier.poll()) == [1, 2]


def test_of_many_layers_the_first_comes_alone_and_none_is_read_too_early() -> None:
    num_layers, indexers = 23, (0, 1, 5, 6, 7, 20, 22)
    geometry = KVGeometry(num_layers=num_layers, latent_dim=3, index_dim=2, index_layers=indexers)
    pool = random_pool(geometry, 4, seed=1)
    tier, copier = manual(pool, 4)
    tier.start(Backup(id=1, device_pages=[3], host_pages=[2]))
    copier.close()
    want = [buffer.clone() for buffer in pool.buffers()]
    latent, index_keys = pool.buffers()
    for buffer in (latent, index_keys):
        buffer.fill_(torch.nan)
    tier.start(LoadBack(id=2, host_pages=[2], device_pages=[1]))
    source, rows = slice(3 * PAGE, 4 * PAGE), slice(PAGE, 2 * PAGE)
    arrived = []
    for layer in range(num_layers):
        tier.wait_layer(layer)
        assert torch.equal(latent[layer, rows], want[0][layer, source])
        if layer in indexers:
            slot = indexers.index(layer)
            assert torch.equal(index_keys[slot, rows], want[1][slot, source])
        arrived.append(int((~latent[:, rows].isnan()).all(dim=(1, 2)).sum()))
    assert arrived[0] == 1
    assert all(have <= layer + 4 for layer, have in enumerate(arrived))
    assert sorted(tier.poll()) == [1, 2]


def test_a_rank_copies_what_it_owns_and_acknowledges_what_it_does_not() -> None:
    """Pages 4, 6, 2 of two ranks are all rank 1's; page 1 is rank 0's."""
    pools = [random_pool(DSA, 3, seed=1, size=2, rank=rank) for rank in range(2)]
    tiers = [manual(pool, 3) for pool in pools]
    before = contents(pools[1])
    for tier, _ in tiers:
        tier.start(Backup(id=1, device_pages=[4, 6, 2], host_pages=[2, 4, 6]))
        tier.start(Backup(id=2, device_pages=[1], host_pages=[5]))
    assert [tier.poll() for tier, _ in tiers] == [[1], [2]]  # at once, with nothing copied
    for _, copier in tiers:
        copier.close()
    assert [tier.poll() for tier, _ in tiers] == [[2], [1]]
    found = [tiers[1][0].object(i).numpy().tobytes() for i in (1, 2, 3)]
    assert found == [before[2], before[3], before[1]]


def test_bytes_that_would_cross_ranks_are_refused() -> None:
    tier, copier = manual(random_pool(DSA, 3, seed=1, size=2, rank=0), 3)
    item = LoadBack(id=1, host_pages=[1, 2], device_pages=[3, 5])
    with pytest.raises(ValueError, match=r"got device pages \[3, 5\] and host pages \[1, 2\]"):
        tier.start(item)
    with pytest.raises(ValueError, match="owner"):
        tier.start(LoadBack(id=2, host_pages=[1, 3], device_pages=[1]))
    assert (tier.poll(), copier.unfinished("in")) == ([], [])


def test_pages_outside_the_pools_are_refused() -> None:
    tier, _ = manual(random_pool(DSA, 3, seed=1), 5)
    with pytest.raises(ValueError, match=r"device row pages must be in 1 to 3, got \[4\]"):
        tier.start(Backup(id=1, device_pages=[4], host_pages=[1]))
    with pytest.raises(ValueError, match=r"host row pages must be in 1 to 5, got \[6\]"):
        tier.start(Backup(id=1, device_pages=[1], host_pages=[6]))
    with pytest.raises(ValueError, match="num_pages must be positive, got 0"):
        HostTier(random_pool(DSA, 3, seed=1), 0)


def test_copy_threads_do_the_same() -> None:
    pool = random_pool(DSA, 8, seed=1)
    tier = HostTier(pool, 8)
    before = contents(pool)
    for i in range(1, 9):
        tier.start(Backup(id=i, device_pages=[i], host_pages=[9 - i]))
    tier.close()
    assert tier.poll() == list(range(1, 9))
    tier = HostTier(pool, 8)
    tier.start(Backup(id=1, device_pages=[1, 2, 3], host_pages=[4, 5, 6]))
    while not tier.poll():
        pass
    tier.start(LoadBack(id=2, host_pages=[6, 5], device_pages=[7, 8]))
    tier.wait_layer(DSA.num_layers - 1)
    after = contents(pool)
    tier.close()
    assert [after[7], after[8]] == [before[3], before[2]]
    assert tier.poll() == [2]


def test_a_slow_backup_holds_up_no_load_back() -> None:
    copier = ThreadCopier()
    gate = threading.Event()
    ran: list[str] = []
    slow = copier.start("out", [gate.wait])  # type: ignore[list-item]
    quick = copier.start("in", [lambda: ran.append("a"), lambda: ran.append("b")])
    quick.wait_step(1)
    assert ran == ["a", "b"] and not slow.is_done()
    gate.set()
    copier.close()
    assert slow.is_done() and quick.is_done()


def test_a_forward_waits_for_its_layer_only() -> None:
    copier = ThreadCopier()
    gate = threading.Event()
    ran: list[int] = []
    copy = copier.start("in", [lambda: ran.append(0), gate.wait])  # type: ignore[list-item]
    copy.wait_step(0)
    assert ran == [0] and not copy.is_done()
    gate.set()
    copy.wait_step(1)
    copier.close()


def test_what_a_copy_raises_reaches_whoever_asks() -> None:
    def fail() -> None:
        raise OSError("the memory is gone")

    copier = ThreadCopier()
    copy = copier.start("in", [fail, lambda: None])
    copier.close()
    for ask in (copy.is_done, lambda: copy.wait_step(1)):
        with pytest.raises(OSError, match="the memory is gone"):
            ask()


def test_an_object_is_the_page_that_a_transfer_would_send() -> None:
    pool = random_pool(DSA, 3, seed=4)
    tier, copier = manual(pool, 3)
    tier.start(Backup(id=1, device_pages=[2], host_pages=[3]))
    copier.close()
    assert torch.equal(tier.object(3), page(pool, 2))
