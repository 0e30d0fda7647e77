"""The real engine over loopback TCP: what arrives, and what is said where it cannot."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from kvcache.pool import KVPool
from kvcache.transfer import mooncake, system
from kvcache.transfer.base import TransferError, TransferUnavailableError, Write
from kvcache.transfer.digest import page_digest
from kvcache.transfer.mooncake import MooncakeEngine, describe
from kvcache.transfer.plan import plan_writes, register_pool
from kvcache.transfer.system import missing_packages, preload
from tests.kvcache.transfer.peer import Peer
from tests.kvcache.transfer.pools import DSA, GEOMETRIES, contents, random_pool

WAIT_S = 60.0
NUM_PAGES = 24
PAGES = list(range(1, NUM_PAGES + 1))
DSA_NAME = "latent+index"


@pytest.fixture(scope="module")
def engine() -> Iterator[MooncakeEngine]:
    found = MooncakeEngine()
    yield found
    found.close()


@pytest.fixture(scope="module")
def other() -> Iterator[MooncakeEngine]:
    found = MooncakeEngine()
    yield found
    found.close()


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    """One that lives and one to kill."""
    with Peer(NUM_PAGES) as lives, Peer(NUM_PAGES) as dies:
        yield lives.wait_ready(), dies.wait_ready()


@pytest.fixture(scope="module")
def peer(peers: tuple[Peer, Peer]) -> Peer:
    return peers[0]


_REGISTERED: list[object] = []  # memory must outlive the engines


def registered(engine: MooncakeEngine, pool: KVPool) -> KVPool:
    register_pool(engine, pool.record())
    _REGISTERED.append(pool)
    return pool


def registered_bytes(engine: MooncakeEngine, memory: torch.Tensor) -> torch.Tensor:
    engine.register(memory.data_ptr(), memory.nbytes)
    _REGISTERED.append(memory)
    return memory


@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_two_engines_in_one_process(
    geometry: str, engine: MooncakeEngine, other: MooncakeEngine
) -> None:
    ours = registered(engine, random_pool(GEOMETRIES[geometry], NUM_PAGES, 1))
    theirs = registered(other, random_pool(GEOMETRIES[geometry], NUM_PAGES, 2))
    source, destination = [3, 4, 5, 20, 1], [7, 8, 2, 24, 9]
    want = contents(theirs)
    for here, there in zip(source, destination, strict=True):
        want[there] = contents(ours)[here]
    writes = plan_writes(ours.record(), theirs.record(), source, destination)
    engine.write(other.session, writes).result(WAIT_S)
    assert contents(theirs) == want


@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_another_process(geometry: str, engine: MooncakeEngine, peer: Peer) -> None:
    ours = registered(engine, random_pool(GEOMETRIES[geometry], NUM_PAGES, 1))
    draw = random.Random(geometry)
    source, destination = draw.sample(PAGES, 15), draw.sample(PAGES, 15)
    want = peer.digests(geometry)
    for here, there in zip(source, destination, strict=True):
        want[there] = page_digest(ours, here)
    writes = plan_writes(ours.record(), peer.records[geometry], source, destination)
    engine.write(peer.session, writes).result(WAIT_S)
    assert peer.digests(geometry) == want


def test_a_request_larger_than_one_piece_and_more_than_fit_in_flight(
    engine: MooncakeEngine, other: MooncakeEngine
) -> None:
    size = 20 * 1024 * 1024 + 7
    source = registered_bytes(engine, torch.randint(256, (size,), dtype=torch.uint8))
    destination = registered_bytes(other, torch.zeros(size, dtype=torch.uint8))
    write = Write(source.data_ptr(), destination.data_ptr(), size)
    engine.write(other.session, [write]).result(WAIT_S)
    assert torch.equal(source, destination)
    destination.zero_()
    many = [Write(write.source + i, write.destination + i, 1) for i in range(0, 6000, 2)]
    engine.write(other.session, many).result(WAIT_S)
    assert torch.equal(source[:6000:2], destination[:6000:2])
    assert int(destination[1:6000:2].sum()) == 0


def test_an_address_that_the_peer_did_not_register(
    engine: MooncakeEngine, other: MooncakeEngine
) -> None:
    ours = registered(engine, random_pool(DSA, NUM_PAGES, 1))
    theirs = registered(other, random_pool(DSA, NUM_PAGES, 2))
    before = contents(theirs)
    buffer = ours.record().buffers[0]
    astray = Write(buffer.address, theirs.record().buffers[0].address + (1 << 44), 64)
    with pytest.raises(TransferError, match="1 of 1 requests failed"):
        engine.write(other.session, [astray]).result(WAIT_S)
    assert contents(theirs) == before
    writes = plan_writes(ours.record(), theirs.record(), [1], [2])
    engine.write(other.session, writes).result(WAIT_S)  # the session still works
    assert contents(theirs)[2] == contents(ours)[1]


def test_the_batch_call_that_nvlink_uses(
    engine: MooncakeEngine, other: MooncakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here over TCP: the same bytes, the same errors."""
    monkeypatch.setattr(engine, "protocol", "nvlink_intra")
    ours = registered(engine, random_pool(DSA, NUM_PAGES, 1))
    theirs = registered(other, random_pool(DSA, NUM_PAGES, 2))
    writes = plan_writes(ours.record(), theirs.record(), PAGES[::-1], PAGES)
    engine.write(other.session, writes).result(WAIT_S)
    assert contents(theirs)[1:] == contents(ours)[:0:-1]
    astray = Write(ours.record().buffers[0].address, 1 << 44, 64)
    with pytest.raises(TransferError, match="a copy of 1 failed"):
        engine.write(other.session, [astray]).result(WAIT_S)


def test_nobody_and_somebody_else_at_the_address(engine: MooncakeEngine) -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    write = Write(memory.data_ptr(), memory.data_ptr(), 8)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        hangs_up = threading.Thread(target=lambda: deaf.accept()[0].close())
        hangs_up.start()
        with pytest.raises(TransferError, match=f"no transfer engine answers at 127.0.0.1:{port}"):
            engine.write(f"127.0.0.1:{port}", [write]).result(WAIT_S)
        hangs_up.join()
    for session in (f"127.0.0.1:{port}", "127.0.0.1:no", "nowhere.invalid:1"):
        with pytest.raises(TransferError, match=f"no transfer engine answers at {session}"):
            engine.write(session, [write]).result(WAIT_S)


def test_a_peer_that_is_killed(engine: MooncakeEngine, peers: tuple[Peer, Peer]) -> None:
    """All writes to it end, those to another peer go on, and so does this process."""
    survivor, victim = peers
    ours = registered(engine, random_pool(DSA, NUM_PAGES, 1))
    to_victim = plan_writes(ours.record(), victim.records[DSA_NAME], PAGES, PAGES)
    futures = [engine.write(victim.session, to_victim) for _ in range(3000)]
    futures[0].result(WAIT_S)
    victim.kill()
    done, waiting = wait(futures, WAIT_S)
    assert not waiting
    errors = [future.exception() for future in done]
    assert any(errors)
    assert all(error is None or isinstance(error, TransferError) for error in errors)
    to_survivor = plan_writes(ours.record(), survivor.records[DSA_NAME], PAGES, PAGES)
    engine.write(survivor.session, to_survivor).result(WAIT_S)
    assert survivor.digests(DSA_NAME)[1:] == [page_digest(ours, page) for page in PAGES]
    engine.forget(victim.session)


def stop(pid: int) -> None:
    """Until none of its threads runs any more: a signal takes its time on a busy machine."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + WAIT_S
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    while any((t / "stat").read_text().rpartition(")")[2].split()[0] != "T" for t in threads):
        assert time.monotonic() < deadline


def test_a_peer_that_is_stopped_and_goes_on(
    engine: MooncakeEngine, other: MooncakeEngine, peer: Peer
) -> None:
    ours = registered(engine, random_pool(DSA, NUM_PAGES, 2))
    theirs = registered(other, random_pool(DSA, NUM_PAGES, 3))
    writes = plan_writes(ours.record(), peer.records[DSA_NAME], PAGES, PAGES)
    engine.write(peer.session, writes[:1]).result(WAIT_S)
    stop(peer.pid)
    stopped = engine.write(peer.session, writes)
    elsewhere = plan_writes(ours.record(), theirs.record(), PAGES, PAGES)
    engine.write(other.session, elsewhere).result(WAIT_S)  # does not wait for it
    assert not stopped.done()
    os.kill(peer.pid, signal.SIGCONT)
    stopped.result(WAIT_S)
    assert peer.digests(DSA_NAME)[1:] == [page_digest(ours, page) for page in PAGES]


def test_a_stopped_peer_is_given_up_on_request(engine: MooncakeEngine, peer: Peer) -> None:
    ours = registered(engine, random_pool(DSA, NUM_PAGES, 4))
    writes = plan_writes(ours.record(), peer.records[DSA_NAME], PAGES, PAGES)
    engine.write(peer.session, writes[:1]).result(WAIT_S)
    stop(peer.pid)
    stopped = engine.write(peer.session, writes)
    engine.forget(peer.session)
    with pytest.raises(TransferError, match="the peer was given up"):
        stopped.result(WAIT_S)
    os.kill(peer.pid, signal.SIGCONT)
    engine.write(peer.session, writes).result(WAIT_S)  # what was given up is waited for first
    assert peer.digests(DSA_NAME)[1:] == [page_digest(ours, page) for page in PAGES]


def test_a_peer_that_stays_stopped(
    engine: MooncakeEngine, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write gives up in the end; one that has not begun finds the peer silent."""
    ours = registered(engine, random_pool(DSA, NUM_PAGES, 5))
    writes = plan_writes(ours.record(), peer.records[DSA_NAME], PAGES, PAGES)
    engine.write(peer.session, writes[:1]).result(WAIT_S)
    monkeypatch.setattr(mooncake, "_STALL_S", 0.05)
    monkeypatch.setattr(mooncake, "_ANSWER_S", 0.05)
    stop(peer.pid)
    try:
        with pytest.raises(TransferError, match=f"nothing moved .* {len(writes)} requests undec"):
            engine.write(peer.session, writes).result(WAIT_S)
        with pytest.raises(TransferError, match=r"no transfer engine answers at .* timed out"):
            engine.write(peer.session, writes).result(WAIT_S)
    finally:
        os.kill(peer.pid, signal.SIGCONT)
    monkeypatch.undo()
    engine.write(peer.session, writes).result(WAIT_S)
    assert peer.digests(DSA_NAME)[1:] == [page_digest(ours, page) for page in PAGES]


def test_a_closed_engine_takes_nothing_and_gives_nothing(other: MooncakeEngine) -> None:
    closed = MooncakeEngine()
    closed.close()
    closed.close()
    memory = torch.zeros(8, dtype=torch.uint8)
    write = Write(memory.data_ptr(), memory.data_ptr(), 8)
    with pytest.raises(TransferError, match="no transfer engine answers"):
        other.write(closed.session, [write]).result(WAIT_S)
    with pytest.raises(TransferError, match="the engine is closed"):
        closed.write(other.session, [write]).result(WAIT_S)


def test_the_protocol_is_what_was_asked_for(engine: MooncakeEngine) -> None:
    assert engine.protocol == "tcp"
    assert describe(engine.session)["protocol"] == "tcp"
    with pytest.raises(ValueError, match="one of tcp, rdma, nvlink, got 'bogus'"):
        MooncakeEngine(protocol="bogus")


def test_rdma_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_RDMA_DEVICES", tmp_path)
    with pytest.raises(TransferUnavailableError, match=r"no RDMA device .* use tcp"):
        MooncakeEngine(protocol="rdma")


def test_an_address_of_another_machine() -> None:
    with pytest.raises(TransferUnavailableError, match="cannot be reached"):
        MooncakeEngine("host.invalid")


def test_memory_is_registered_once(engine: MooncakeEngine) -> None:
    memory = registered_bytes(engine, torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(TransferError, match="registering 64 bytes at 0x"):
        engine.register(memory.data_ptr(), 64)


def test_nothing_is_printed() -> None:
    code = (
        "from kvcache.transfer.mooncake import MooncakeEngine\n"
        "engine = MooncakeEngine()\n"
        "engine.close()\n"
        "engine.close()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert (ran.stdout, ran.stderr) == ("", "")


@pytest.mark.parametrize(
    ("blocked", "message"),
    [
        ("raise ModuleNotFoundError('mooncake')", "pip install mooncake-transfer-engine-non-cuda"),
        (
            "raise ImportError('libibverbs.so.1: cannot open')",
            r"lacks a system library \(libibverbs.so.1.*apt-get install libibverbs1 .*--colocated",
        ),
    ],
)
def test_what_is_missing_is_named(
    blocked: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "engine.py").write_text(blocked)
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TransferUnavailableError, match=message):
        MooncakeEngine()


def test_private_libraries_are_loaded_whatever_their_order(tmp_path: Path) -> None:
    (tmp_path / "libbroken.so.1").write_bytes(b"no library")
    real = [
        path
        for folder in ("/lib", "/usr/lib")
        for path in Path(folder).glob("*/libnuma.so.1")
        if path.is_file()
    ]
    for path in real[:1]:
        (tmp_path / path.name).symlink_to(path)
    assert preload(tmp_path) == sorted(tmp_path.glob("libnuma*"))
    assert preload(tmp_path / "absent") == []


def test_what_the_system_lacks_is_named_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_packages(for_cuda=False) == []  # as these tests need it
    monkeypatch.setitem(system._PACKAGES, "libabsent.so.1", "libabsent1")
    monkeypatch.setitem(system._CUDA_PACKAGES, "libnone.so.1", "libnone1")
    assert missing_packages(for_cuda=False) == ["libabsent1"]
    assert missing_packages(for_cuda=True)[-1] == "libnone1"
