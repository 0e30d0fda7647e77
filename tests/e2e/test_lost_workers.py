"""Workers that are killed or hang while they answer: clients see nothing of it but the time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.asking import (
    Answer,
    Ask,
    ask_of,
    assert_all_given_back,
    client_of,
    tell,
    tell_one_at_a_time,
)
from tests.served import LINE_TIMEOUT_S, Served, serving

pytestmark = pytest.mark.e2e

NUM_STREAMS = 16
NUM_TOKENS = 60


def streams() -> list[Ask]:
    """Greedy and seeded, on both routes."""
    asks = []
    for number in range(NUM_STREAMS):
        body = {"model": "tiny", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        chosen = {"temperature": 0} if number % 2 else {"seed": number, "temperature": 0.7}
        asks.append(ask_of(f"Tell me {number} things.", number % 4 < 2, False, {**body, **chosen}))
    return asks


@pytest.fixture(scope="module")
def expected(served: Served) -> list[Answer]:
    return asyncio.run(tell_one_at_a_time(served, streams()))


async def told_while(served: Served, strike: Callable[[int], None]) -> list[Answer]:
    """The answers of all streams, whose worker is struck once each of them has begun."""
    begun: set[int] = set()
    [worker] = served.workers()

    def on_chunk(number: int) -> None:
        if len(begun) < NUM_STREAMS:
            begun.add(number)
            if len(begun) == NUM_STREAMS:
                strike(worker.pid)

    async with client_of(served) as http:
        asks = enumerate(streams())
        answers = await asyncio.gather(
            *(tell(http, ask, lambda number=number: on_chunk(number)) for number, ask in asks)
        )
    assert len(begun) == NUM_STREAMS
    worker.wait(LINE_TIMEOUT_S)
    return answers


async def test_a_killed_worker_is_invisible(served: Served, expected: list[Answer]) -> None:
    before = served.metrics()("plait_replays_total")
    answers = await told_while(served, lambda pid: os.kill(pid, signal.SIGKILL))
    assert answers == expected
    assert served.metrics()("plait_replays_total") > before
    assert_all_given_back(served)


async def test_a_worker_that_hangs_is_killed_and_invisible(
    served: Served, expected: list[Answer]
) -> None:
    answers = await told_while(served, lambda pid: os.kill(pid, signal.SIGSTOP))
    served.wait_for(re.compile(r"colocated 0 \(pid \d+\) hangs: silent for 6 s; killed"))
    assert answers == expected
    assert_all_given_back(served)


def test_a_request_that_is_lost_without_a_token_each_time_is_given_up(tiny_dsa: Path) -> None:
    """The worker is killed whenever it has the request and has not said a token of it."""
    flags = ("--colocated", "--max-replays", "1", "--chunked-prefill-size", "1")
    poison = ask_of("Poison. " * 200, False, False, {"model": "tiny", "max_tokens": 2})
    poison.body.update(stream=True, ignore_eos=True, temperature=0)

    async def tell_poison() -> Answer:
        async with client_of(running) as http:
            return await tell(http, poison)

    with serving(tiny_dsa, *flags) as running, ThreadPoolExecutor(1) as pool:
        running.wait_ready()
        told = pool.submit(lambda: asyncio.run(tell_poison()))
        num_struck = 0

        def strikes_until_told() -> bool:
            nonlocal num_struck
            for worker in httpx.get(f"{running.url}/status", timeout=60).json()["workers"]:
                if worker["requests"]:
                    with contextlib.suppress(ProcessLookupError):  # its end is not known yet
                        os.kill(worker["pid"], signal.SIGKILL)
                        num_struck += 1
            return told.done()

        running.until(strikes_until_told)
        assert num_struck >= 2
        assert "the request was lost 2 times" in told.result().error
        [other] = asyncio.run(tell_one_at_a_time(running, streams()[:1]))
        assert not other.error
        assert other.choices[0].finish_reason == "length"
        running.stop()
