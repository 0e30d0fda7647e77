"""A group of two processes of which one copies seconds later than the other: nobody waits who need
not, no page is reused before its time, aborts included, and every answer is what it is alone."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import held_rank
from tests.engine.client import Client
from tests.tiny import save_dsa

PAGE = 64
LATE_S = 2.0  # how late the rank is; nothing is measured by it


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(num_tokens)]


class Held:
    """A group of two whose rank 1 holds its copies, and a client of it."""

    def __init__(self, model: Path, folder: Path, num_pages: int) -> None:
        self.folder = folder
        self.client = Client(
            model, max_total_tokens=PAGE * num_pages // 2, hicache=True, cp_size=2, hicache_ratio=4
        )
        self.scheduler = self.client.engine.scheduler

    def go(self, lane: str) -> None:
        (self.folder / f"{lane}.goes").touch()

    def hold(self, lane: str) -> None:
        (self.folder / f"{lane}.goes").unlink()
        (self.folder / f"{lane}.holds").unlink(missing_ok=True)

    def holds(self, lane: str) -> bool:
        return (self.folder / f"{lane}.holds").exists()

    def step_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not is_so():
            assert time.monotonic() < deadline
            if not self.client.step():
                time.sleep(0.01)

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
def held(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    spawn = functools.partial(held_rank.spawn, tmp_path)
    monkeypatch.setattr("engine.parallel.group._spawn", spawn)
    held = Held(model, tmp_path, num_pages=12)
    yield held
    for lane in ("in", "out"):
        held.go(lane)
    held.client.close()


def test_copies_of_a_rank_that_is_seconds_late(held: Held, expected) -> None:
    client, scheduler = held.client, held.scheduler
    first, second, third = (prompt(4 * PAGE + 9, seed=n) for n in (1, 2, 3))

    # Backups are held: what they read stays locked; who has room goes on, who has none waits.
    client.submit("first", first, temperature=0.0)
    held.step_until(lambda: held.is_done("first") and held.holds("out"))
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
    threading.Timer(LATE_S, held.go, ["out"]).start()
    held.step_until(lambda: held.is_done("third"))
    client.run()

    # A load-back is held: the step waits at its first layer, on both ranks, and then is right.
    client.submit("first again", first, temperature=0.0)
    timer = threading.Timer(LATE_S, held.go, ["in"])
    timer.start()
    held.step_until(lambda: held.is_done("first again"))
    timer.join()
    assert held.holds("in")
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
