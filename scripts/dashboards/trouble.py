"""Load for a running fleet, and everything that can go wrong with one. Knows no Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from scripts.dashboards.monitors import free_port, until
from server.bench.workload import corpus
from tests.served import PLAIT, Served

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NUM_ODD = 10_000  # requests with names of their own


@contextlib.contextmanager
def bench(served: Served, *flags: str) -> Iterator[None]:
    """`plait bench` beside what the block does; waited for at its end, whatever came of it."""
    argv = [*PLAIT, "bench", "--base-url", served.url, *flags]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
        process.wait()
    finally:
        process.kill()
        process.wait()


class Fleet:
    def __init__(self, served: Served) -> None:
        self.served = served

    def workers(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.served.url}/status", timeout=60).json()
        found: list[dict[str, Any]] = answer["workers"]
        return found

    def is_whole(self) -> bool:
        return {worker["role"] for worker in self.workers()} == {"prefill", "decode"}

    def busy(self, role: str) -> psutil.Process:
        """A worker of this role, once it computes."""
        until(self.is_whole, "all workers are there")

        def find() -> list[int]:
            return [
                worker["pid"]
                for worker in self.workers()
                if worker["role"] == role and worker["load"]["running"]
            ]

        until(lambda: bool(find()), f"a {role} worker is busy")
        return psutil.Process(*find()[:1])

    def kill(self, role: str) -> None:
        """A busy worker, and wait for its successor."""
        process = self.busy(role)
        process.kill()
        until(lambda: not process.is_running(), "the killed worker has ended")
        until(self.is_whole, f"the {role} worker has a successor")


@contextlib.contextmanager
def without_decode(fleet: Fleet) -> Iterator[None]:
    """The decode worker is killed and its successor held up at its start, as long as the block
    lasts."""
    until(fleet.is_whole, "all workers are there")
    (pid,) = (worker["pid"] for worker in fleet.workers() if worker["role"] == "decode")
    psutil.Process(pid).kill()
    held: list[psutil.Process] = []

    def hold() -> bool:
        for process in fleet.served.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid != pid and '"role":"decode"' in " ".join(process.cmdline()):
                    process.suspend()
                    held.append(process)
        return bool(held)

    until(hold, "the decode worker has a successor")
    try:
        yield
    finally:
        held[0].resume()


@contextlib.contextmanager
def another_model(served: Served, model: Path) -> Iterator[str]:
    """host:port of a front end of the same workers that holds this model, not theirs: it refuses
    them. Ends with the block."""
    fleet = Fleet(served)
    until(fleet.is_whole, "all workers are there")
    port = free_port()
    addresses = ",".join(worker["address"] for worker in fleet.workers())
    argv = ["frontend", "--model", str(model), "--port", str(port), "--workers", addresses]
    process = subprocess.Popen(
        [*PLAIT, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def refused(served: Served) -> None:
    """One request for each of the ways to be wrong."""
    with httpx.Client(base_url=served.url, timeout=60) as http:
        http.get("/no/such/route")
        http.delete(COMPLETIONS)
        http.post(COMPLETIONS, content=b"{")
        http.post(COMPLETIONS, json={"model": "nobody's", "prompt": "x"})
        http.post(COMPLETIONS, json={"model": served.model, "prompt": "x", "temperature": 9})
        http.post(CHAT, json={"model": served.model, "messages": "none"})


def overrun(served: Served, num: int) -> int:
    """So many requests at once; how many were answered 503."""
    body = {"model": served.model, "max_tokens": 8, "temperature": 0}

    async def ask() -> int:
        limits = httpx.Limits(max_connections=num)
        async with httpx.AsyncClient(base_url=served.url, timeout=600, limits=limits) as http:
            answers = await asyncio.gather(
                *(
                    http.post(COMPLETIONS, json={**body, "prompt": f"Number {i}"})
                    for i in range(num)
                )
            )
        return sum(answer.status_code == 503 for answer in answers)

    return asyncio.run(ask())


def leave(served: Served) -> None:
    """A client that asks for much and goes after the first piece."""
    body = {"model": served.model, "prompt": "Once", "max_tokens": 500, "stream": True}
    with (
        httpx.Client(base_url=served.url, timeout=60) as http,
        http.stream("POST", COMPLETIONS, json=body | {"ignore_eos": True}) as answer,
    ):
        next(answer.iter_bytes())


def ask_long(served: Served, part: int) -> None:
    """The same few documents again and again, more than the pools hold: they leave the device and
    come back from the host."""
    text = corpus()
    start = part % 5 * 4000
    body = {"model": served.model, "prompt": text[start : start + 4000], "max_tokens": 4}
    httpx.post(served.url + COMPLETIONS, json=body, timeout=600).raise_for_status()


def odd_names(served: Served) -> None:
    """NUM_ODD requests, each with a model, a path, a user and a request id that nobody else has."""

    async def ask(http: httpx.AsyncClient, number: int) -> None:
        headers = {"x-request-id": f"id-{number}", "traceparent": f"odd-{number}"}
        match number % 4:
            case 0:
                await http.get(f"/path-{number}", headers=headers)
            case 1:
                await http.get(f"/v1/models/model-{number}", headers=headers)
            case 2:
                body = {"model": f"model-{number}", "prompt": "x", "user": f"user-{number}"}
                await http.post(COMPLETIONS, json=body, headers=headers)
            case _:
                body = {"model": served.model, "messages": "none", f"field-{number}": 1}
                await http.post(f"{CHAT}?q={number}", json=body, headers=headers)

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=600) as http:
            for start in range(0, NUM_ODD, 50):
                await asyncio.gather(*(ask(http, i) for i in range(start, start + 50)))

    asyncio.run(ask_all())
