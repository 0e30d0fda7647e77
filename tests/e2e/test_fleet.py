"""The whole picture: a front end, a prefill group of two ranks and a decode worker, as
`plait serve` starts them, over the real transfer engine. Answers equal those of one worker that
does it all, whatever is killed or held up meanwhile, and everything is given back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.asking import Answer, Ask, ask_of, chunks, client_of, tell, tell_one_at_a_time
from tests.served import READY, Served, serving

pytestmark = pytest.mark.e2e

RANK_TOKENS = 1024  # of KV on one prefill rank; the group holds twice that
TOPK = 16
NUM_STREAMS = 12


def fleet_asks() -> list[Ask]:
    """30 prompts, greedy and seeded: short, longer than the indexer's top-k, longer than what one
    rank holds; all streamed, with the tokens."""
    draw = random.Random(11)
    words = ["river", "stone", "bread", "moon", "train", "old", "blue", "seven", "happy", "music"]
    asks = []
    for number in range(30):
        num_words = (3, TOPK, 60, 130, 1100)[number % 5]
        text = " ".join(draw.choice(words) for _ in range(num_words))
        body: dict[str, Any] = {"model": "tiny", "stream": True, "ignore_eos": True}
        body |= {"max_tokens": draw.randrange(1, 40), "logprobs": True}
        body |= {"temperature": 0} if number % 2 else {"seed": number, "temperature": 0.8}
        asks.append(ask_of(text, True, False, body))
    return asks


def streams(num: int = NUM_STREAMS, num_tokens: int = 60) -> list[Ask]:
    asks = []
    for number in range(num):
        body = {"model": "tiny", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        chosen = {"temperature": 0} if number % 2 else {"seed": number, "temperature": 0.7}
        text = f"Tell me {number} things. " + "And then some more. " * (number % 5 * 8)
        asks.append(ask_of(text, True, False, {**body, **chosen}))
    return asks


class Fleet:
    """A running `plait serve` with its processes."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.served.url}/status", timeout=60).json()
        return answer

    def pid(self, what: str) -> int:
        """Of the decode worker, or of a prefill rank: "decode", "leader" or "rank"."""
        role = "decode" if what == "decode" else "prefill"
        (pid,) = [w["pid"] for w in self.status()["workers"] if w["role"] == role]
        if what != "rank":
            return int(pid)
        (rank,) = psutil.Process(pid).children()
        return rank.pid

    def until_whole(self) -> None:
        self.served.until(lambda: self.status()["status"] == "ok")

    def assert_all_given_back(self) -> None:
        """Waits until all is quiet: then every page is free or cached, and no room is open."""

        def is_quiet() -> bool:
            status = self.status()
            if status["status"] != "ok" or status["requests"] or status["parked"]:
                return False
            workers = status["workers"]
            return all(
                w["pages"]
                and not w["load"]["running"] + w["load"]["waiting"] + w["load"]["rooms"]
                and not w["pages"]["device"]["fenced"] + w["pages"]["device"]["used"]
                for w in workers
            )

        self.served.until(is_quiet)
        for worker in self.status()["workers"]:
            pages = worker["pages"]["device"]
            assert pages["cached"] + pages["free"] == pages["total"], worker


@pytest.fixture(scope="module")
def fleet(tiny_dsa: Path) -> Iterator[Fleet]:
    flags = ["--prefill-max-total-tokens", str(RANK_TOKENS), "--decode-max-total-tokens", "4096"]
    flags += ["--max-replays", "20", "--drain-timeout-s", "600"]
    with serving(tiny_dsa, *flags) as served:
        served.wait_ready()
        yield Fleet(served)
        if served.process.poll() is None:  # the last test has not ended it
            served.stop()


@pytest.fixture(scope="module")
def colocated(tiny_dsa: Path) -> Iterator[Served]:
    with serving(tiny_dsa, "--colocated", "--max-total-tokens", "4096") as served:
        served.wait_ready()
        yield served
        served.stop()


def test_handed_over_equals_colocated(fleet: Fleet, colocated: Served) -> None:
    asks = fleet_asks()
    expected = asyncio.run(tell_one_at_a_time(colocated, asks))
    contents = [ask.body["messages"][0]["content"] for ask in asks]
    longest = {"model": "tiny", "prompt": max(contents, key=len)}
    assert httpx.post(f"{colocated.url}/tokenize", json=longest).json()["count"] > RANK_TOKENS
    assert asyncio.run(tell_one_at_a_time(fleet.served, asks)) == expected

    async def together() -> list[Answer]:
        async with client_of(fleet.served) as http:
            return await asyncio.gather(*(tell(http, ask) for ask in asks))

    assert asyncio.run(together()) == expected
    assert not any(answer.error for answer in expected)
    seen = fleet.served.metrics()
    handed = 'event="handed_over"'
    assert seen("plait_scheduler_events_total", handed) > 0
    for rank in (0, 1):
        assert seen("plait_handoff_pages_sent_total", f'rank="{rank}"') > 0
    assert seen("plait_replays_total") == 0
    fleet.assert_all_given_back()


@pytest.fixture(scope="module")
def expected(colocated: Served) -> list[Answer]:
    return asyncio.run(tell_one_at_a_time(colocated, streams()))


async def told_while(served: Served, strike: Any) -> list[Answer]:
    """The answers of all streams; `strike` happens once each has begun."""
    begun: set[int] = set()

    def on_chunk(number: int) -> None:
        if len(begun) < NUM_STREAMS:
            begun.add(number)
            if len(begun) == NUM_STREAMS:
                strike()

    async with client_of(served) as http:
        tasks = [
            tell(http, ask, lambda number=number: on_chunk(number))  # type: ignore[misc]
            for number, ask in enumerate(streams())
        ]
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize("what", ["decode", "rank", "leader"])
def test_a_killed_process_is_invisible(fleet: Fleet, expected: list[Answer], what: str) -> None:
    fleet.until_whole()
    pid = fleet.pid(what)
    answers = asyncio.run(told_while(fleet.served, lambda: psutil.Process(pid).kill()))
    assert answers == expected
    fleet.served.wait_for(READY)
    fleet.assert_all_given_back()


@pytest.mark.parametrize("what", ["decode", "rank", "leader"])
def test_a_process_that_is_held_up_is_waited_for_or_replaced(
    fleet: Fleet, expected: list[Answer], what: str
) -> None:
    fleet.until_whole()
    pid = fleet.pid(what)
    process = psutil.Process(pid)
    answers: list[Answer] = []

    async def run() -> None:
        nonlocal answers
        task = asyncio.create_task(
            told_while(fleet.served, lambda: process.send_signal(signal.SIGSTOP))
        )
        while process.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0)
        before = fleet.served.metrics()("plait_output_tokens_total")
        for _ in itertools.repeat(None, 20):  # some rounds of heartbeats pass
            await asyncio.to_thread(fleet.status)
        assert before <= fleet.served.metrics()("plait_output_tokens_total")
        with contextlib.suppress(psutil.NoSuchProcess):  # on a slow machine: it was replaced
            process.send_signal(signal.SIGCONT)
        answers = await task

    asyncio.run(run())
    assert answers == expected
    fleet.assert_all_given_back()


def test_clients_that_leave_take_nothing_with_them(fleet: Fleet, expected: list[Answer]) -> None:
    fleet.until_whole()
    draw = random.Random(3)

    async def leave(http: httpx.AsyncClient, ask: Ask, num_chunks: int) -> None:
        read = 0
        stream = chunks(http, ask)
        async for _ in stream:
            read += 1
            if read > num_chunks:
                await stream.aclose()
                return

    async def run() -> list[Answer]:
        async with client_of(fleet.served) as http:
            leaving = [leave(http, ask, draw.randrange(30)) for ask in streams()]
            staying = [tell(http, ask) for ask in streams()]
            mixed = await asyncio.gather(*leaving, *staying)
            return [answer for answer in mixed if isinstance(answer, Answer)]

    assert asyncio.run(run()) == expected
    fleet.assert_all_given_back()


def test_sigterm_to_every_process_at_once_cuts_nothing_off(
    fleet: Fleet, expected: list[Answer]
) -> None:
    """As a supervisor ends a whole unit: ranks, decode worker and front end, each by itself."""
    fleet.until_whole()
    workers = fleet.served.workers()

    def strike() -> None:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        fleet.served.send(signal.SIGTERM)

    assert asyncio.run(told_while(fleet.served, strike)) == expected
    assert fleet.served.wait() == 0
    assert not [worker for worker in workers if worker.is_running()]
