"""A group of two processes of which one copies later than the other: nobody waits who need not, no
page is reused before its time, aborts included, and every answer is what it is alone."""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from kvcache.host_copies import LANES, Lane
from tests.engine import held_rank
from tests.engine.client import Client
from tests.tiny import save_dsa

PAGE = 64


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(num_tokens)]


class Held:
    """A group of two whose rank 1 holds its copies, and a client of it."""

    def __init__(self, client: Client, gates: Mapping[Lane, int], says: int) -> None:
        """`gates`, `says`: this side's ends of the rank's pipes."""
        self.client = client
        self.scheduler = client.engine.scheduler
        self._gates = dict(gates)
        self._said: set[str] = set()
        self._lane_after: dict[str, Lane] = {}
        self._hears = threading.Thread(target=self._hear, args=(says,))
        self._hears.start()

    def go(self, lane: Lane) -> None:
        if (gate := self._gates.pop(lane, None)) is not None:
            os.close(gate)

    def go_after(self, said: str, lane: Lane) -> None:
        """Once the rank says so next."""
        self._lane_after[said] = lane

    def has_said(self, what: str) -> bool:
        return what in self._said

    def step_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if not self.client.step():
                assert self.client.woken.acquire(timeout=120)

    def close(self) -> None:
        for lane in LANES:
            self.go(lane)
        self.client.close()
        self._hears.join()

    def _hear(self, says: int) -> None:
        with open(says) as lines:
            for line in lines:
                said = line.strip()
                self._said.add(said)
                if (lane := self._lane_after.pop(said, None)) is not None:
                    self.go(lane)
                self.client.woken.release()

    def is_done(self, *rids: str) -> bool:
        return all(rid in self.client.ends for rid in rids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dsa(tmp_path_factory.mktemp("dsa"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[list[int]], list[int]]:
    """The answer of a prompt alone, with an empty cache."""
    alone = Client(model, max_total_tokens=PAGE * 16)

    @functools.cache
    def answer(token_ids: tuple[int, ...]) -> list[int]:
        rid = f"{len(alone.tokens)}"
        alone.submit(rid, list(token_ids), temperature=0.0)
        alone.run()
        alone.engine.scheduler.cache.reset()
        return alone.tokens[rid]

    return lambda token_ids: answer(tuple(token_ids))


@pytest.fixture
def held(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    gates, (hears, says) = {lane: os.pipe() for lane in LANES}, os.pipe()
    pipes = held_rank.Pipes({lane: ends[0] for lane, ends in gates.items()}, says)
    spawn = functools.partial(held_rank.spawn, pipes)
    monkeypatch.setattr("engine.parallel.group._spawn", spawn)
    options = {"max_total_tokens": PAGE * 6, "cp_size": 2, "hicache": True, "hicache_ratio": 4}
    client = Client(model, **options)
    for end in (*pipes.gates.values(), says):
        os.close(end)
    held = Held(client, {lane: ends[1] for lane, ends in gates.items()}, hears)
    yield held
    held.close()


def test_copies_of_a_rank_that_is_late(held: Held, expected) -> None:
    client, scheduler = held.client, held.scheduler
    first, second, third = (prompt(4 * PAGE + 9, seed=n) for n in (1, 2, 3))

    # Backups are held: what they read stays locked; who has room goes on, who has none waits.
    client.submit("first", first, temperature=0.0)
    held.step_until(lambda: held.is_done("first") and held.has_said("out holds"))
    client.submit("aborted", [*first, 5, 6, 7], temperature=0.0, max_tokens=200)
    held.step_until(lambda: len(client.tokens.get("aborted", [])) > 3)
    client.abort("aborted")
    client.submit("second", second, temperature=0.0)
    held.step_until(lambda: held.is_done("second"))
    client.submit("third", third, temperature=0.0)
    for _ in range(50):
        assert not client.step()  # nothing to do, and no complaint
        assert scheduler.load.num_waiting == 1
    assert scheduler.load.locked_pages >= 8
    held.go("out")
    held.step_until(lambda: held.is_done("third"))
    client.run()

    # A load-back is held until the step waits for it at its first layer; then it is right.
    client.submit("first again", first, temperature=0.0)
    held.go_after("in is waited for", "in")
    held.step_until(lambda: held.is_done("first again"))
    assert held.has_said("in holds") and held.has_said("in is waited for")
    assert client.ends["first again"].cached_host_tokens >= PAGE
    client.run()

    # Held again, and its request aborted as soon as the step is over.
    client.takes_reports = False
    client.submit("second again", second, temperature=0.0, max_tokens=200)
    held.step_until(lambda: scheduler.cache.num_under_way > 0)
    client.abort("second again")
    assert scheduler.load.locked_pages > 0
    client.takes_reports = True
    client.run()

    for rid, token_ids in (("first", first), ("second", second), ("third", third)):
        assert client.tokens[rid] == expected(token_ids)
    assert client.tokens["first again"] == expected(first)
    num = len(client.tokens["aborted"])
    assert num > 3
    client.submit("aborted again", [*first, 5, 6, 7], temperature=0.0, max_tokens=num)
    client.run()
    assert client.tokens["aborted again"] == client.tokens["aborted"]
    assert scheduler.cache.num_under_way == 0
    assert scheduler.load.locked_pages == 0
    scheduler.cache.check()
    counts = scheduler.cache.counts
    assert counts["backups_started"] == counts["backups_finished"] > 0
    assert counts["load_backs_started"] == counts["load_backs_finished"] > 0
