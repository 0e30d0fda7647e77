"""Pages between pools on a CUDA device, over TCP within one process."""

from __future__ import annotations

import queue

import pytest
import torch

from engine.handoff.pusher import Pusher
from engine.handoff.room import Reservation, RoomReport
from kvcache.pool import KVPool
from kvcache.transfer.digest import page_digest
from kvcache.transfer.mooncake import MooncakeEngine
from kvcache.transfer.plan import register_pool
from tests.identity import MODEL_ID
from tests.kvcache.transfer.pools import GEOMETRIES, PAGE, randomise

NUM_PAGES = 12


@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_what_the_device_has_still_to_write_is_waited_for(geometry: str) -> None:
    """The rows are filled by work launched just before the push, behind a long queue."""
    pools = [
        KVPool.create(GEOMETRIES[geometry], PAGE, NUM_PAGES, torch.bfloat16, "cuda")
        for _ in range(2)
    ]
    engines = [MooncakeEngine() for _ in pools]
    for engine, pool in zip(engines, pools, strict=True):
        register_pool(engine, pool.record())
    ours, theirs = pools
    for buffer in (*ours.buffers(), *theirs.buffers()):
        buffer.zero_()
    reports: queue.Queue[RoomReport] = queue.Queue()
    pusher = Pusher(ours, engines[0], 0, reports.put)
    pages = list(range(1, NUM_PAGES + 1))
    reservation = Reservation(
        session=engines[1].session,
        pool=theirs.record(),
        model_id=MODEL_ID,
        first_position=0,
        dst_pages=pages[::-1],
    )
    pusher.open("room", reservation)
    matrix = torch.rand(4096, 4096, device="cuda")
    for _ in range(50):
        matrix = matrix @ matrix / matrix.norm()
    randomise(ours)
    pusher.push("room", pages, [page - 1 for page in pages], True)
    report = reports.get(timeout=60)
    assert (report.status, report.error, report.num_pages) == ("done", "", NUM_PAGES)
    for engine in engines:
        engine.close()
    pusher.close()
    torch.cuda.synchronize()
    digests = [page_digest(ours, page) for page in pages]
    assert len(set(digests)) == NUM_PAGES
    assert [page_digest(theirs, page) for page in pages[::-1]] == digests
