"""The host tier on a CUDA device: pinned objects, copies on streams, layers waited for."""

from __future__ import annotations

import pytest
import torch

from kernels.copy_pages import copy_pages
from kvcache.host_plan import Backup, LoadBack
from kvcache.host_tier import HostTier
from kvcache.layout import KVGeometry
from kvcache.pool import KVPool
from tests.kvcache.transfer.pools import GEOMETRIES, PAGE, poison, randomise

GEOMETRIES = GEOMETRIES | {
    "odd": KVGeometry(num_layers=3, latent_dim=7, index_dim=5, index_layers=(1,)),
    "656 bytes": KVGeometry(num_layers=2, latent_dim=328),
    "real": KVGeometry(num_layers=5, latent_dim=576, index_dim=128, index_layers=(0, 3)),
    "real, fp8 index": KVGeometry(
        num_layers=5, latent_dim=576, index_dim=128, index_layers=(0, 3), fp8_index_keys=True
    ),
}


def digests(pool: KVPool, row_pages: list[int]) -> list[bytes]:
    parts = []
    for page in row_pages:
        rows = slice(page * PAGE, (page + 1) * PAGE)
        data = [b[:, rows].contiguous().view(torch.uint8).cpu().numpy() for b in pool.buffers()]
        parts.append(b"".join(part.tobytes() for part in data))
    return parts


def busy(seconds: float = 0.05) -> None:
    """Keep the current stream occupied."""
    torch.cuda._sleep(int(seconds * 1.5e9))


@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_pages_come_back_as_they_were(geometry: str) -> None:
    """Written by work that is still queued when the backup starts, read by work queued right after
    the load-back has."""
    pool = KVPool.create(GEOMETRIES[geometry], PAGE, 40, torch.bfloat16, "cuda")
    tier = HostTier(pool, 50)
    source = [7, 3, 39, 40, 1, 22]
    busy()
    randomise(pool)
    tier.start(Backup(id=1, device_pages=source, host_pages=[50, 2, 9, 1, 30, 31]))
    before = digests(pool, source)
    torch.cuda.synchronize()
    assert tier.poll() == [1]
    assert tier.object(9).numpy().tobytes() == before[2]
    busy()
    poison(pool)
    tier.start(LoadBack(id=2, host_pages=[31, 30, 1, 9, 2, 50], device_pages=[4, 5, 6, 8, 9, 10]))
    for layer in range(GEOMETRIES[geometry].num_layers):
        tier.wait_layer(layer)
    assert digests(pool, [10, 9, 8, 6, 5, 4]) == before
    assert digests(pool, [11]) != before[:1]
    torch.cuda.synchronize()
    assert tier.poll() == [2]
    tier.close()


def test_large_pages_go_by_the_copy_engine_and_come_back_as_they_were() -> None:
    """Staged, more of them than one staging holds, while work that writes them is still queued."""
    geometry = KVGeometry(num_layers=19, latent_dim=576, index_dim=128, index_layers=(0, 3, 18))
    pool = KVPool.create(geometry, 64, 60, torch.bfloat16, "cuda")
    tier = HostTier(pool, 60)
    assert tier.page_bytes > 2**20
    num_staged = len(tier._staging)
    assert 1 < num_staged < 60
    source, places = list(range(60, 0, -1)), list(range(1, 61))
    busy()
    randomise(pool)
    tier.start(Backup(id=1, device_pages=source, host_pages=places))
    before = [buffer.clone() for buffer in pool.buffers()]
    busy()
    torch.cuda.synchronize()
    assert tier.poll() == [1]
    poison(pool)
    tier.start(LoadBack(id=2, host_pages=places, device_pages=source))
    for layer in range(geometry.num_layers):
        tier.wait_layer(layer)
        assert torch.equal(pool._latent[layer, 64:], before[0][layer, 64:])
    assert torch.equal(pool.buffers()[1][:, 64:], before[1][:, 64:])
    torch.cuda.synchronize()
    assert tier.poll() == [2]
    tier.close()


def test_a_copy_is_polled_and_never_waited_for() -> None:
    pool = KVPool.create(GEOMETRIES["real"], PAGE, 4, torch.bfloat16, "cuda")
    tier = HostTier(pool, 4)
    tier.start(Backup(id=1, device_pages=[1], host_pages=[1]))  # compiles the kernel
    torch.cuda.synchronize()
    assert tier.poll() == [1]
    busy(1.0)
    tier.start(Backup(id=2, device_pages=[1], host_pages=[1]))
    assert tier.poll() == []
    torch.cuda.synchronize()
    assert tier.poll() == [2]


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_named_pages_and_no_others(
    dtype: torch.dtype, has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the CPU, with the kernel and without; page sizes that fit no power of two."""
    monkeypatch.setattr("kernels.copy_pages.gpu_kernels", lambda *tensors: has_triton)
    for elements in (100, 73, 36864, 36865):
        drawn = torch.randint(0, 120, (3, 9, elements)).to(dtype)
        host = torch.empty_like(drawn, pin_memory=True).copy_(drawn)
        poison = torch.full((3, 5, elements), 121).to(dtype)
        device, back = poison.cuda(), torch.empty_like(poison, pin_memory=True).copy_(poison)
        here, there, back_to = (torch.tensor(p) for p in ([8, 0, 3], [1, 4, 2], [4, 0, 3]))
        want = poison.clone()
        copy_pages(want, there, host, here)
        copy_pages(device, there.cuda(), host, here.cuda())
        assert torch.equal(device.cpu(), want)
        copy_pages(back, back_to.cuda(), device, there.cuda())
        torch.cuda.synchronize()
        want = poison.clone()
        copy_pages(want, back_to, device.cpu(), there)
        assert torch.equal(back, want)


def test_pages_beyond_two_to_the_32_words() -> None:
    """Of one byte each, as the page size is odd."""
    elements, num_pages = 73729, 35_000
    device = torch.empty((2, num_pages, elements), dtype=torch.uint8, device="cuda")
    host = torch.randint(0, 250, (2, 3, elements), dtype=torch.uint8).pin_memory()
    back = torch.full((2, 3, elements), 251, dtype=torch.uint8).pin_memory()
    far, near = torch.tensor([num_pages - 1, 3, num_pages // 2]).cuda(), torch.arange(3).cuda()
    copy_pages(device, far, host, near)
    assert torch.equal(device[:, far].cpu(), host)
    copy_pages(back, near, device, far)
    torch.cuda.synchronize()
    assert torch.equal(back, host)
