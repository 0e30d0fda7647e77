"""Workers that are killed or hang while they answer: clients see nothing of it but the time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable

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
from tests.served import Served

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
    assert not worker.is_running()
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
    served.wait_for(re.compile(r"worker 0 \(pid \d+\) hangs: silent for 6 s; killed"))
    assert answers == expected
    assert_all_given_back(served)


async def test_a_request_whose_workers_die_is_given_up_and_others_live(
    served: Served, expected: list[Answer]
) -> None:
    """The worker is killed each time that it computes for the request."""
    poison = ask_of("Poison.", False, False, {"model": "tiny", "max_tokens": 600})
    poison.body.update(stream=True, ignore_eos=True, temperature=0)
    struck: list[int] = []
    others: list[asyncio.Task[Answer]] = []

    async with client_of(served) as http:

        def strike() -> None:
            """Unless the worker that sent this chunk is gone already and the next is not there."""
            pids = [worker.pid for worker in served.workers()]
            if pids in ([], struck[-1:]) or not served.metrics()("plait_workers_ready"):
                return
            if len(struck) == 1:
                others.extend(asyncio.create_task(tell(http, ask)) for ask in streams()[:4])
            struck.extend(pids)
            os.kill(pids[0], signal.SIGKILL)

        answer = await tell(http, poison, strike)
        assert await asyncio.gather(*others) == expected[:4]
    assert len(struck) == 3
    assert "lost its worker 3 times" in answer.error
    assert answer.choices[0].finish_reason is None
    assert_all_given_back(served)
