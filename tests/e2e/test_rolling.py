"""A cluster whose workers a front end finds through the Kubernetes API, and which are replaced, and
ended, under running streams: no stream breaks, every process ends with code 0."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.asking import Answer, Ask, ask_of, client_of, tell, tell_one_at_a_time
from tests.served import LINE_TIMEOUT_S, FrontEnd, Running
from tests.server.discovery.fake_api import FakeApi, endpoint
from tests.server.discovery.following import credentials_in

pytestmark = pytest.mark.e2e

NUM_STREAMS = 8
PATIENT = ["--drain-timeout-s", "600"]  # so that what runs is finished on a slow machine, too
LISTENS = re.compile(r"ready at tcp://127\.0\.0\.1:(\d+)")


def streams() -> list[Ask]:
    asks = []
    for number in range(NUM_STREAMS):
        body = {"model": "tiny", "max_tokens": 60, "ignore_eos": True, "stream": True}
        chosen = {"temperature": 0} if number % 2 else {"seed": number, "temperature": 0.7}
        text = f"Tell me {number} things. " + "And then some more. " * (number % 4 * 8)
        asks.append(ask_of(text, True, False, {**body, **chosen}))
    return asks


class Cluster:
    """Workers are started by hand and published at the API; the front end is told of the API."""

    def __init__(self, model: Path, folder: Path, stack: contextlib.ExitStack) -> None:
        self._model = model
        self._stack = stack
        self.api = stack.enter_context(contextlib.closing(FakeApi()))
        self._ports: dict[str, int] = {}
        items = "k8s://plait-prefill:control,k8s://plait-decode.models:control"
        argv = ["--model", str(model), "--port", "0", "--workers", items]
        argv += ["--kubernetes-api", self.api.url]
        argv += ["--kubernetes-credentials", str(credentials_in(folder))]
        argv += ["--drain-delay-s", "0.5", *PATIENT]
        self.front_end = FrontEnd("frontend", *argv)
        stack.callback(self.front_end.close)

    def start(self, role: str, *flags: str) -> Running:
        argv = [role, "--model", str(self._model), "--listen", "tcp://127.0.0.1:0"]
        argv += ["--dtype", "float32", "--device", "cpu", "--max-total-tokens", "4096", *flags]
        worker = Running(*argv, new_group=True)
        self._stack.callback(worker.close)
        return worker

    def publish(self, name: str, role: str, worker: Running) -> None:
        self._ports[name] = int(worker.wait_for(LISTENS)[1])
        self.api.put(name, self._ports[name], [endpoint("127.0.0.1")], service=f"plait-{role}")

    def terminate(self, name: str, role: str) -> None:
        """As the API says it of a pod that is being deleted."""
        ending = endpoint("127.0.0.1", ready=False, terminating=True)
        self.api.put(name, self._ports[name], [ending], service=f"plait-{role}")

    def until_workers(self, number: int) -> None:
        """That many are known, and take requests."""

        def are_there() -> bool:
            status = httpx.get(f"{self.front_end.url}/status", timeout=60).json()
            return [worker["health"] for worker in status["workers"]] == ["ok"] * number

        self.front_end.until(are_there)

    def lost(self) -> float:
        return self.front_end.metrics()("plait_replays_total", 'reason="lost"')

    async def told_while(self, strike: Callable[[], None], num_begun: int) -> list[Answer]:
        """The answers of all streams; `strike` happens once so many have begun."""
        begun: set[int] = set()

        def on_chunk(number: int) -> None:
            if number not in begun and len(begun) < num_begun:
                begun.add(number)
                if len(begun) == num_begun:
                    strike()

        async with client_of(self.front_end) as http:
            asks = enumerate(streams())
            tasks = [tell(http, ask, lambda number=n: on_chunk(number)) for n, ask in asks]  # type: ignore[misc]
            return await asyncio.gather(*tasks)


def test_workers_are_replaced_and_all_is_ended_under_running_streams(
    tiny_dsa: Path, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tiny_dsa, tmp_path, stack)
        group = cluster.start("prefill", "--prefill-cp-size", "2", *PATIENT)
        decode = cluster.start("decode", "--drain-timeout-s", "0")
        cluster.publish("prefill-0", "prefill", group)
        cluster.publish("decode-0", "decode", decode)
        cluster.front_end.wait_serving()
        expected = asyncio.run(tell_one_at_a_time(cluster.front_end, streams()))
        assert not any(answer.error for answer in expected)

        replace_decode_worker(cluster, decode, expected)
        replace_prefill_group(cluster, group, expected)
        end_everything(cluster, expected)


def replace_decode_worker(cluster: Cluster, old: Running, expected: list[Answer]) -> None:
    """It may not finish anything: all it has goes on at its successor."""
    cluster.publish("decode-1", "decode", cluster.start("decode", *PATIENT))
    cluster.until_workers(3)

    def strike() -> None:
        cluster.terminate("decode-0", "decode")
        old.send(signal.SIGTERM)

    assert asyncio.run(cluster.told_while(strike, NUM_STREAMS)) == expected
    assert old.wait() == 0
    cluster.api.delete("decode-0")
    cluster.until_workers(2)
    assert cluster.lost() == 0
    handed_back = cluster.front_end.metrics()("plait_replays_total", 'reason="handed_back"')
    assert handed_back > 0


def replace_prefill_group(cluster: Cluster, old: Running, expected: list[Answer]) -> None:
    """SIGTERM to all of its processes, while it has prompts yet to compute."""
    cluster.publish("prefill-1", "prefill", cluster.start("prefill", *PATIENT))
    cluster.until_workers(3)
    ranks = old.workers()
    assert len(ranks) == 1

    def strike() -> None:
        cluster.terminate("prefill-0", "prefill")
        os.killpg(old.process.pid, signal.SIGTERM)

    assert asyncio.run(cluster.told_while(strike, 1)) == expected
    assert old.wait() == 0
    assert not ranks[0].is_running()
    assert cluster.lost() == 0
    cluster.until_workers(2)


def end_everything(cluster: Cluster, expected: list[Answer]) -> None:
    """SIGTERM to all processes at once, as a supervisor does that ends a whole unit."""
    front_end = cluster.front_end
    status = httpx.get(f"{front_end.url}/status", timeout=60).json()
    workers = [psutil.Process(worker["pid"]) for worker in status["workers"]]

    def strike() -> None:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        front_end.send(signal.SIGTERM)
        assert httpx.get(f"{front_end.url}/live", timeout=60).status_code == 200

    assert asyncio.run(cluster.told_while(strike, NUM_STREAMS)) == expected
    assert front_end.wait() == 0
    psutil.wait_procs(workers, timeout=LINE_TIMEOUT_S)
    assert not [worker for worker in workers if worker.is_running()]


@pytest.fixture
def loading(tiny_dsa: Path) -> Iterator[Running]:
    argv = ["decode", "--model", str(tiny_dsa), "--listen", "tcp://127.0.0.1:0", "--device", "cpu"]
    with contextlib.closing(Running(*argv)) as worker:
        yield worker


def test_a_worker_that_is_ended_while_it_loads_ends_with_code_0(loading: Running) -> None:
    """Also from the moment on in which `plait decode` becomes the worker."""
    process = psutil.Process(loading.process.pid)
    loading.until(lambda: "engine" in process.cmdline())
    loading.send(signal.SIGTERM)
    assert loading.wait() == 0
