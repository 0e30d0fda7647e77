"""The host tier in an engine: what leaves the device's prefix cache comes back from host memory,
and every answer is what it is without."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine.host_side import HostCopyError
from kvcache.host_copies import Copy, Lane, Step, ThreadCopier
from kvcache.host_size import HostMemoryError
from kvcache.transfer.loopback import LoopbackNetwork
from tests.engine.apart import run_apart
from tests.engine.client import Client
from tests.engine.handoff.pair import Pair
from tests.tiny import SAVES

PAGE = 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp(name)) for name, save in SAVES.items()}


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(num_tokens)]


def tiered(folder: Path, num_pages: int, **options) -> Client:
    """`num_pages` of each rank."""
    return Client(folder, max_total_tokens=PAGE * num_pages, **{"hicache": True, **options})


def ask(client: Client, rid: str, token_ids: list[int], **sampling) -> list[int]:
    """The answer, once nothing is under way any more."""
    client.submit(rid, token_ids, temperature=0.0, **sampling)
    client.run()
    return client.tokens[rid]


def assert_settled(client: Client) -> None:
    scheduler = client.engine.scheduler
    assert scheduler.is_idle
    assert scheduler.cache.num_under_way == 0
    assert scheduler.load.locked_pages == 0
    scheduler.cache.check()
    counts = scheduler.cache.counts
    for kind in ("backups", "load_backs"):
        assert counts[f"{kind}_started"] == counts[f"{kind}_finished"]


FULL_VIEW = {"cp_size": 2, "shared_kv": False}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((m, {}) for m in SAVES),
        *((m, {"cp_size": 2}) for m in ("dsa", "gqa")),
        ("dsa", FULL_VIEW),
    ],
    ids=str,
)
def test_what_was_evicted_comes_back_as_it_was(folders, model, options) -> None:
    num_ranks = options.get("cp_size", 1) if options.get("shared_kv", True) else 1
    prompts = {f"p{i}": prompt(4 * PAGE + 10, seed=i) for i in range(4)}
    cold = Client(folders[model], max_total_tokens=PAGE * 8)
    expected = {rid: ask(cold, rid, token_ids) for rid, token_ids in prompts.items()}
    client = tiered(folders[model], 8 // num_ranks, chunked_prefill_size=100, **options)
    try:
        for rid, token_ids in prompts.items():
            assert ask(client, rid, token_ids) == expected[rid]
        assert client.engine.scheduler.cache.counts["loaded_back_tokens"] == 0
        for rid, token_ids in prompts.items():
            assert ask(client, f"{rid} again", token_ids) == expected[rid]
            assert client.ends[f"{rid} again"].cached_tokens == 4 * PAGE
        by_host = [client.ends[f"{rid} again"].cached_host_tokens for rid in prompts]
        assert sum(by_host) == client.engine.scheduler.cache.counts["loaded_back_tokens"]
        assert ask(client, "hot", prompts["p3"]) == expected["p3"]
        assert client.ends["hot"].cached_tokens == 4 * PAGE
        assert client.ends["hot"].cached_host_tokens == 0
        assert client.engine.scheduler.cache.counts["loaded_back_tokens"] >= 3 * 4 * PAGE
        assert_settled(client)
        reports = client.engine.host_reports
        assert set(reports) == set(range(client.engine.group.size))
        assert all(report.num_bytes["load_back"] > 0 for report in reports.values())
    finally:
        client.close()


def conversations(num: int, seed: int) -> list[tuple[str, list[int], dict]]:
    """Requests with prefixes in common, of mixed lengths and parameters."""
    rng = random.Random(seed)
    prefixes = [prompt(n, seed=100 + n) for n in (64, 130, 200, 260, 320)]
    found = []
    for i in range(num):
        token_ids = rng.choice(prefixes) + prompt(rng.choice([1, 30, 65]), seed=rng.randrange(12))
        sampling = {"max_tokens": rng.choice([1, 7, 20]), "seed": i}
        sampling["temperature"] = rng.choice([0.0, 0.8])
        found.append((f"r{i}", token_ids, sampling))
    return found


@pytest.fixture(scope="module")
def asked() -> list[tuple[str, list[int], dict]]:
    return conversations(96, seed=1)


@pytest.fixture(scope="module")
def alone(folders, asked) -> dict[str, list[int]]:
    """What each is answered alone, with an empty cache."""
    client = Client(folders["dsa"], max_total_tokens=PAGE * 64, chunked_prefill_size=4096)
    for rid, token_ids, sampling in asked:
        client.submit(rid, token_ids, **sampling)
        client.run()
        client.engine.scheduler.cache.reset()
    return client.tokens


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_crowd_over_two_small_tiers_is_answered_as_each_alone(folders, asked, alone, policy):
    """64 at once: chunks, decodes and load-backs in one batch, the host pool too small as well."""
    client = tiered(
        folders["dsa"],
        14,
        hicache_ratio=0.8,
        hicache_write_policy=policy,
        chunked_prefill_size=150,
        max_running_requests=64,
    )
    for rid, token_ids, sampling in asked[:64]:
        client.submit(rid, token_ids, **sampling)
    client.run()
    for rid, token_ids, sampling in asked[64:]:
        client.submit(rid, token_ids, **sampling)
        client.step()
    client.run()
    assert client.tokens == alone
    counts = client.engine.scheduler.cache.counts
    assert counts["loaded_back_tokens"] > 0
    assert counts["evicted_device_pages"] > 0
    assert_settled(client)
    client.close()


@pytest.mark.parametrize("cp_size", [1, 2])
def test_aborts_while_copies_run_leave_nothing_behind(folders, asked, alone, cp_size) -> None:
    """Reports are held back at random, so that requests end with their copies under way."""
    rng = random.Random(5)
    client = tiered(
        folders["dsa"],
        12 // cp_size,
        hicache_ratio=1.5,
        cp_size=cp_size,
        chunked_prefill_size=100,
        max_running_requests=8,
    )
    aborted = set()
    try:
        for rid, token_ids, sampling in asked[: 64 // cp_size]:
            client.submit(rid, token_ids, **sampling)
            client.takes_reports = rng.random() < 0.3
            client.step()
            if rng.random() < 0.4:
                victim = rng.choice(asked)[0]
                if victim in client.prompts and victim not in client.ends:
                    client.abort(victim)
                    aborted.add(victim)
        client.takes_reports = True
        client.run()
        assert aborted
        for rid, tokens in client.tokens.items():
            assert tokens == (alone[rid][: len(tokens)] if rid in aborted else alone[rid])
        assert client.engine.scheduler.cache.counts["loaded_back_tokens"] > 0
        assert_settled(client)
    finally:
        client.close()


class Lazy(ThreadCopier):
    """Load-backs that run step by step when a forward asks for the step, and not before."""

    def start(self, lane: Lane, steps: Sequence[Step]) -> Copy:
        return LazyCopy(steps) if lane == "in" else super().start(lane, steps)


class LazyCopy:
    seconds = 0.0

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        self._num_run = 0
        self._ended = threading.Event()

    def wait_step(self, index: int) -> None:
        while self._num_run <= index:
            self._steps[self._num_run]()
            self._num_run += 1
        if self.is_done():
            self._ended.set()

    def is_done(self) -> bool:
        return self._num_run == len(self._steps)

    def wait(self) -> None:
        assert self._ended.wait(60), "no forward has asked for the last layer"


@pytest.mark.parametrize(
    ("model", "cp_size"), [("dsa", 1), ("mla", 1), ("gqa", 1), ("dsa", 2), ("gqa", 2)]
)
def test_a_layer_is_read_only_once_its_bytes_are_there(folders, monkeypatch, model, cp_size):
    """Latent rows, keys, values and index keys, by prefills and by decodes of the same batch."""
    monkeypatch.setattr("kvcache.host_tier.new_copier", lambda device: Lazy())
    prompts = [prompt(4 * PAGE + n, seed=n) for n in (1, 70)]
    client = tiered(folders[model], 10 // cp_size, cp_size=cp_size)
    try:
        expected = [list(ask(client, f"{i}", token_ids)) for i, token_ids in enumerate(prompts)]
        ask(client, "other", prompt(9 * PAGE, seed=3))
        for i, token_ids in enumerate(prompts):
            client.submit(f"{i} again", token_ids, temperature=0.0)
        client.run()
        assert [client.tokens[f"{i} again"] for i in range(2)] == expected
        assert client.engine.scheduler.cache.counts["load_backs_started"] == 2
        assert_settled(client)
    finally:
        client.close()


@pytest.mark.parametrize("model", SAVES)
def test_a_recorded_decode_reads_layers_only_once_their_bytes_are_there(
    folders, monkeypatch, model
):
    """Of a prompt that is loaded back but for its last token, the prefill is a decode's work."""
    run_apart(monkeypatch)
    monkeypatch.setattr("kvcache.host_tier.new_copier", lambda device: Lazy())
    client = tiered(folders[model], 10)
    asked = prompt(4 * PAGE + 1, seed=1)
    expected = list(ask(client, "first", asked))
    ask(client, "other", prompt(9 * PAGE, seed=3))
    for buffer in client.engine.leader.pool.buffers():
        buffer.fill_(torch.nan)
    assert ask(client, "again", asked) == expected
    assert client.ends["again"].cached_host_tokens == 4 * PAGE
    assert_settled(client)
    client.close()


class Gate(ThreadCopier):
    """Backups begin only once `opened` is set."""

    opened = threading.Event()

    def start(self, lane: Lane, steps: Sequence[Step]) -> Copy:
        if lane == "in":
            return super().start(lane, steps)
        return super().start(lane, [lambda: self.opened.wait(60) and None, *steps])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(Gate, "opened", threading.Event())
    monkeypatch.setattr("kvcache.host_tier.new_copier", lambda device: Gate())
    yield Gate.opened
    Gate.opened.set()


def test_pages_stay_while_a_backup_reads_them_and_who_needs_them_waits(folders, gate) -> None:
    client = tiered(folders["dsa"], 6)
    client.submit("first", prompt(5 * PAGE, seed=1), max_tokens=20, temperature=0.0)
    while not client.engine.scheduler.cache.num_under_way:
        client.step()
    client.abort("first")
    client.submit("second", prompt(5 * PAGE, seed=2), temperature=0.0)
    while client.step():
        pass
    assert client.engine.scheduler.load.locked_pages == 5
    assert client.engine.scheduler.load.num_waiting == 1
    assert "second" not in client.tokens
    gate.set()
    client.run()
    assert client.ends["second"].finish_reason == "length"
    assert_settled(client)
    client.close()


def test_an_abort_before_the_load_back_is_acknowledged_unlocks_with_the_acknowledgement(folders):
    client = tiered(folders["gqa"], 6)
    first = prompt(4 * PAGE + 5, seed=1)
    expected = list(ask(client, "first", first))
    ask(client, "second", prompt(5 * PAGE, seed=2))
    client.takes_reports = False
    client.submit("again", first, temperature=0.0)
    client.step()
    assert client.engine.scheduler.cache.counts["load_backs_started"] == 1
    client.abort("again")
    assert client.engine.scheduler.load.locked_pages > 0
    client.takes_reports = True
    client.run()
    assert_settled(client)
    assert ask(client, "third", first) == expected
    client.close()


def test_over_the_quota_the_shorter_prefix_serves(folders) -> None:
    """All of the pool is needed: loading 7 pages back would leave no page for a running batch."""
    client = tiered(folders["dsa"], 8)
    long = prompt(7 * PAGE + 50, seed=1)
    expected = list(ask(client, "first", long, max_tokens=3))
    ask(client, "second", prompt(7 * PAGE + 50, seed=2), max_tokens=3)
    assert ask(client, "again", long, max_tokens=3) == expected
    assert client.engine.scheduler.cache.counts["load_backs_skipped_quota"] == 1
    assert client.engine.scheduler.cache.counts["load_backs_started"] == 0
    assert client.ends["again"].cached_tokens < 7 * PAGE
    assert_settled(client)
    client.close()


def test_one_that_waits_for_pages_loads_nothing_back_and_is_counted_once(folders) -> None:
    client = tiered(folders["dsa"], 8)
    known = prompt(4 * PAGE + 5, seed=1)
    expected = list(ask(client, "first", known))
    client.submit("running", prompt(6 * PAGE, seed=2), max_tokens=30, temperature=0.0)
    client.step()
    client.submit("waiting", known, temperature=0.0)
    for _ in range(10):
        client.step()
    counts = client.engine.scheduler.cache.counts
    assert client.engine.scheduler.load.num_waiting == 1
    assert counts["load_backs_started"] == 0
    assert not [name for name in counts if name.startswith("load_backs_skipped")]
    client.run()
    assert client.tokens["waiting"] == expected
    assert counts["load_backs_started"] == 1
    assert_settled(client)
    client.close()


def test_a_copy_that_fails_ends_the_worker(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise OSError("the memory is gone")

    monkeypatch.setattr("kvcache.host_tier.copy_pages", broken)
    client = tiered(folders["gqa"], 6)
    client.submit("r", prompt(3 * PAGE, seed=1))
    with pytest.raises(HostCopyError, match=r"rank 0: OSError.*the memory is gone"):
        client.run()
    client.close()


@pytest.mark.parametrize("what", ["ThreadCopier.start", "_ThreadCopy.wait"])
def test_a_copy_that_does_not_start_or_cannot_be_waited_for_ends_the_worker(
    folders, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Were it one step's failure, the tree would promise bytes that never came."""

    def broken(*args: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(f"kvcache.host_copies.{what}", broken)
    client = tiered(folders["gqa"], 6)
    client.submit("r", prompt(3 * PAGE, seed=1))
    with pytest.raises(HostCopyError, match=r"item 1 on rank 0: RuntimeError.*the device is gone"):
        client.run()
    client.close()


def test_a_load_back_that_fails_is_no_answer(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    client = tiered(folders["dsa"], 6)
    first = prompt(4 * PAGE + 5, seed=1)
    ask(client, "first", first)
    ask(client, "second", prompt(5 * PAGE, seed=2))

    def broken(*args: object) -> None:
        raise OSError("the memory is gone")

    monkeypatch.setattr("kvcache.host_tier.copy_pages", broken)
    client.submit("again", first)
    with pytest.raises(HostCopyError, match="a load-back on rank 0 failed"):
        client.step()
    client.close()


def test_both_sides_of_a_hand_off_have_their_own_tier(folders, monkeypatch) -> None:
    network = LoopbackNetwork()
    monkeypatch.setattr("engine.loading.MooncakeEngine", lambda host, protocol: network.engine())
    prompts = {f"p{i}": prompt(4 * PAGE + 10, seed=i) for i in range(4)}
    cold = Client(folders["dsa"], max_total_tokens=PAGE * 8)
    expected = {rid: ask(cold, rid, token_ids) for rid, token_ids in prompts.items()}
    options = {"max_total_tokens": PAGE * 8, "hicache": True}
    pair = Pair(folders["dsa"], prefill=options, decode=options)
    for turn in ("", " again"):
        for rid, token_ids in prompts.items():
            pair.submit(rid + turn, token_ids, temperature=0.0)
            pair.run()
            assert pair.tokens(rid + turn) == expected[rid]
    for node in (pair.prefill, pair.decode):
        assert node.scheduler.cache.counts["loaded_back_tokens"] >= 3 * 4 * PAGE
    pair.assert_all_given_back()
    pair.close()


def test_a_host_pool_that_does_not_fit_is_refused_with_what_would(folders) -> None:
    with pytest.raises(HostMemoryError, match=r"--hicache-size 1e\+06: .* accepted: .* to "):
        tiered(folders["gqa"], 6, hicache_size=1e6)
