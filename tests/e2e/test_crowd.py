"""Many requests at once against a KV pool that is too small for them: each is answered as if it
were alone, clients that leave take nothing with them, and all memory comes back."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tests.e2e.asking import (
    NUM_LONG,
    Answer,
    Ask,
    assert_all_given_back,
    chunks,
    client_of,
    mixed_asks,
    tell,
    tell_one_at_a_time,
    tell_together,
)
from tests.served import Served

pytestmark = pytest.mark.e2e

NUM_DIFFERENT = 22
NUM_TOGETHER = 200
NUM_LEAVING = 100


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return mixed_asks(NUM_DIFFERENT, seed=3)


@pytest.fixture(scope="module")
def expected(served: Served, asks: list[Ask]) -> list[Answer]:
    """What each is answered when it is alone."""
    return asyncio.run(tell_one_at_a_time(served, asks))


def retractions(served: Served) -> float:
    return served.metrics()("plait_scheduler_events_total", 'event="retracted"')


async def test_a_crowd_is_answered_as_each_alone(
    served: Served, asks: list[Ask], expected: list[Answer]
) -> None:
    short = range(NUM_LONG, NUM_DIFFERENT)
    places = [*range(NUM_LONG), *random.Random(5).choices(short, k=NUM_TOGETHER - NUM_LONG)]
    before = retractions(served)
    answers = await tell_together(served, [asks[place] for place in places])
    for place, answer in zip(places, answers, strict=True):
        assert answer == expected[place], asks[place]
        assert not answer.error
        assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
    assert retractions(served) > before
    assert_all_given_back(served)


async def test_clients_that_leave_disturb_nobody_and_leave_nothing(
    served: Served, asks: list[Ask], expected: list[Answer]
) -> None:
    draw = random.Random(7)
    stayers = [draw.randrange(NUM_LONG, NUM_DIFFERENT) for _ in range(NUM_TOGETHER - NUM_LEAVING)]
    progress = Progress()
    async with client_of(served) as http:

        async def leave_a_stream(ask: Ask, num_chunks: int) -> None:
            num_seen = 0
            async for value in chunks(http, ask):
                assert "error" not in value
                num_seen += 1
                progress.count()
                if num_seen == num_chunks:
                    return
            raise AssertionError(f"the answer was over after {num_seen} chunks")

        async def leave_a_body(ask: Ask, num_others: int) -> None:
            waiting = asyncio.create_task(tell(http, ask))
            await progress.reach(num_others)
            assert waiting.cancel(), "it was answered before its client left"
            await asyncio.wait([waiting])

        before = served.metrics()("plait_aborts_total")
        leavers = []
        for number in range(NUM_LEAVING):
            ask = long_ask(draw.choice(asks), is_streamed=number % 2 == 0)
            leave = leave_a_stream if number % 2 == 0 else leave_a_body
            leavers.append(leave(ask, draw.randrange(1, 40)))
        staying = [tell(http, asks[place], progress.count) for place in stayers]
        order: list[object] = [*staying, *leavers]
        draw.shuffle(order)
        results = await asyncio.gather(*order)  # type: ignore[call-overload]
    by_place = {id(told): result for told, result in zip(order, results, strict=True)}
    for place, told in zip(stayers, staying, strict=True):
        assert by_place[id(told)] == expected[place], asks[place]
    assert_all_given_back(served)
    assert served.metrics()("plait_aborts_total") > before


def long_ask(ask: Ask, is_streamed: bool) -> Ask:
    """One that is far from its end when its client leaves."""
    body = {key: value for key, value in ask.body.items() if key not in ("stop", "n")}
    body |= {"max_tokens": 800, "ignore_eos": True, "stream": is_streamed}
    return replace(ask, body=body)


class Progress:
    """How many chunks all streams together have brought."""

    def __init__(self) -> None:
        self._num_chunks = 0
        self._changed = asyncio.Event()

    def count(self) -> None:
        self._num_chunks += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def reach(self, num_chunks: int) -> None:
        while self._num_chunks < num_chunks:
            await self._changed.wait()
