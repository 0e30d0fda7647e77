"""The worker's loop around a real engine, over a real socket."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine.channel import Channel
from engine.config import WorkerConfig
from engine.handoff.room import Incoming, Reservation
from engine.health import HealthServer, Vitals
from engine.loading import load_engine
from engine.messages import Drain, Handoff, Outputs, Prefill, Submit
from engine.plan import StepPlan, StepResult
from engine.types import Request, Role, SamplingParams, TokenOut
from engine.worker import Worker
from kvcache.transfer.loopback import LoopbackEngine, LoopbackNetwork
from tests.served import LINE_TIMEOUT_S
from tests.tiny import save_dsa


def config_of(folder: Path, role: Role = "colocated") -> WorkerConfig:
    return WorkerConfig(
        model=str(save_dsa(folder)),
        listen_address=f"ipc://{folder}/w",
        role=role,
        device="cpu",
        dtype="float32",
        max_total_tokens=1024,
    )


def test_a_finished_hand_off_does_not_wait_for_the_step_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = LoopbackNetwork()
    monkeypatch.setattr("engine.loading.MooncakeEngine", lambda host, protocol: network.engine())
    config = config_of(tmp_path, "prefill")
    address = config.listen_address
    engine = load_engine(config)
    sender = engine.leader.transfer
    assert isinstance(sender, LoopbackEngine)
    execute, goes_on, is_held = engine.leader.execute, threading.Event(), threading.Event()
    steps: list[int] = []

    def held_from_the_second_on(plan: StepPlan) -> StepResult:
        steps.append(plan.step)
        if len(steps) > 1:
            is_held.set()
            assert goes_on.wait(60)
        return execute(plan)

    monkeypatch.setattr(
        type(engine.leader), "execute", lambda self, plan: held_from_the_second_on(plan)
    )
    # Where the pages go: another part of this process's memory with the same shape.
    twin = load_engine(msgspec.structs.replace(config, listen_address="", role="decode"))
    assert twin.destination is not None
    worker = Worker(config, engine, Channel("worker", "w", bind=address))
    loop = threading.Thread(target=worker.run)
    loop.start()
    peers = {kind: Channel(kind, kind) for kind in ("frontend", "worker")}  # type: ignore[arg-type]
    for peer in peers.values():
        peer.dial(address)

    def heard(kind: str, wanted: type) -> Any:
        while True:
            for _, message in peers[kind].receive(0.1):
                if isinstance(message, wanted):
                    return message

    def ask(room: str, page: int) -> None:
        assert twin.destination is not None
        peers["worker"].send(
            address,
            Prefill(
                room=room,
                frontend="frontend",
                request=Request(
                    rid=room, token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=4)
                ),
                output_ids=[],
                attempt=0,
                reservation=Reservation(
                    session=twin.destination.session,
                    pool=twin.destination.pool,
                    model_id=twin.destination.model_id,
                    first_position=0,
                    dst_pages=[page],
                ),
            ),
        )

    stall = sender.stall_next()
    for kind in peers:
        heard(kind, object)  # hello: the worker knows us
    ask("a", 1)
    assert heard("frontend", Outputs).outs[0].rid == "a"
    ask("b", 2)
    assert is_held.wait(60), "the step of b runs"
    stall.release()
    assert heard("worker", Handoff).room == "a"
    goes_on.set()
    assert heard("worker", Handoff).room == "b"
    peers["frontend"].send(address, Drain())
    while loop.is_alive():
        peers["frontend"].receive(0.05)
    for peer in peers.values():
        peer.close()
    twin.close()


def test_a_failed_step_ends_its_requests_and_a_lost_device_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA context that has seen a fault fails every later call: a worker that lived on would
    fail every later request, and look idle."""
    config = config_of(tmp_path)
    address = config.listen_address
    worker = Worker(config, load_engine(config), Channel("worker", "w", bind=address))
    scheduler = worker._engine.scheduler
    rank = type(worker._engine.leader)

    def raises(what: str) -> Callable[..., None]:
        def call(*args: object) -> None:
            raise RuntimeError(what)

        return call

    def step(rid: str) -> list[TokenOut]:
        sampling = SamplingParams(max_tokens=4)
        scheduler.submit(Request(rid=rid, token_ids=[5, 6, 7], sampling=sampling), [])
        plan = scheduler.plan()
        assert plan is not None
        with worker._lock:
            return worker._step(plan)

    with monkeypatch.context() as patch:
        patch.setattr(rank, "execute", raises("no memory"))
        (out,) = step("a")
        assert out.finish_reason == "error" and "RuntimeError: no memory" in out.error
    (out,) = step("b")
    assert len(out.ids) == 1 and not out.finish_reason
    monkeypatch.setattr(rank, "execute", raises("an illegal memory access"))
    monkeypatch.setattr(rank, "settle", raises("the device is lost"))
    with pytest.raises(RuntimeError, match="the device is lost"):
        step("c")
    worker._channel.close()
    worker._engine.close()


def test_pages_are_settled_before_another_worker_is_asked_to_write_into_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = LoopbackNetwork()
    monkeypatch.setattr("engine.loading.MooncakeEngine", lambda host, protocol: network.engine())
    config = config_of(tmp_path, "decode")
    address = config.listen_address
    worker = Worker(config, load_engine(config), Channel("worker", "w", bind=address))
    happened: list[object] = []
    monkeypatch.setattr(
        type(worker._engine.leader), "settle", lambda rank: happened.append("settled")
    )
    monkeypatch.setattr(
        worker._channel, "send", lambda peer, message: happened.append(type(message))
    )
    request = Request(rid="a", token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=4))
    incoming = Incoming("room", f"ipc://{tmp_path}/p", "frontend", "")
    worker._scheduler.submit(request, [], incoming=incoming)
    with worker._lock:
        worker._turn()
    assert happened == ["settled", Prefill]
    worker._channel.close()
    worker._engine.close()


def test_probes_follow_the_worker_from_its_start_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is under way when the end is asked for; each step asks the probes."""
    config = config_of(tmp_path)
    address = config.listen_address
    vitals = Vitals(config.role)
    server = HealthServer("127.0.0.1:0", vitals)
    http = httpx.Client(base_url=f"http://127.0.0.1:{server.port}")

    def statuses() -> tuple[int, int, int]:
        live, ready, health = (http.get(f"/{name}") for name in ("live", "ready", "health"))
        return live.status_code, ready.status_code, health.status_code

    assert statuses() == (200, 503, 503)
    engine = load_engine(config)
    worker = Worker(config, engine, Channel("worker", "w", bind=address), vitals=vitals)
    execute = engine.leader.execute
    seen: list[tuple[int, int, int]] = []

    def ask_first(plan: StepPlan) -> StepResult:
        seen.append(statuses())
        worker.drain()
        return execute(plan)

    monkeypatch.setattr(type(engine.leader), "execute", lambda self, plan: ask_first(plan))
    frontend = Channel("frontend", "f")
    frontend.dial(address)
    loop = threading.Thread(target=worker.run)
    loop.start()
    heard: list[object] = []
    while not heard:
        heard += frontend.receive(0.1)  # hello
    request = Request(rid="r", token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=3))
    frontend.send(address, Submit(request=request))
    while loop.is_alive():
        heard += frontend.receive(0.05)
    assert seen == [(200, 200, 200), (200, 503, 200), (200, 503, 200)]
    page = http.get("/metrics").text
    assert 'plait_kv_utilization{role="colocated"}' in page
    assert 'plait_computed_tokens_total{phase="prefill",role="colocated"} 3.0' in page
    http.close()
    server.close()
    frontend.close()


LOSES_ITS_EXIT = """
import ctypes, os, signal, threading
from engine.worker import _end_where_it_loads

def call_back():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass

_end_where_it_loads()
ctypes.CFUNCTYPE(None)(call_back)()
print("goes on", flush=True)
threading.Event().wait()
"""


def test_a_worker_that_loads_ends_also_where_a_call_back_swallows_its_exit() -> None:
    command = [sys.executable, "-c", LOSES_ITS_EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LINE_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
