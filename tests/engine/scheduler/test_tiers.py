"""The scheduler over two tiers and twin ranks: thousands of small requests with random prefixes,
copies that end late and out of order, aborts and pins; each answer is the one without any cache,
and the reasons for which a copy is not made come up and are counted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine.scheduler.scheduler import Scheduler
from engine.types import Request, SamplingParams, TokenOut
from kvcache.allocator import CPSharedPagedAllocator, lane_of_page
from kvcache.host_plan import Backup, HostItem, LoadBack, WritePolicy
from kvcache.tiered_cache import TieredCache
from tests.engine.scheduler.twin import Twin, next_token

VOCAB = 50
PAGE = 4


@dataclass
class Ranks(Twin):
    """With host memory. A backup reads its pages when its last rank is done, as late as it may."""

    lanes: int = 1
    host_rows: dict[int, int] = field(default_factory=dict)
    waits_for: dict[int, list[int]] = field(default_factory=dict)  # item -> ranks
    items: dict[int, HostItem] = field(default_factory=dict)

    def execute(self, plan):
        for item in (*plan.host.load_backs, *plan.host.backups):
            self.items[item.id] = item
            self.waits_for[item.id] = list(range(self.lanes))
            for here, there in zip(item.device_pages, item.host_pages, strict=True):
                assert lane_of_page(here, self.lanes) == lane_of_page(there, self.lanes)
            if isinstance(item, LoadBack):
                self.copy(item)
        return super().execute(plan)

    def copy(self, item: HostItem) -> None:
        for here, there in zip(item.device_pages, item.host_pages, strict=True):
            for offset in range(self.page_size):
                device, host = here * self.page_size + offset, there * self.page_size + offset
                if isinstance(item, Backup):
                    self.host_rows[host] = self.rows[device]
                else:
                    self.rows[device] = self.host_rows[host]

    def acknowledge(self, rng: random.Random) -> tuple[int, int]:
        """(item, rank): any that is due."""
        item = rng.choice(list(self.waits_for))
        ranks = self.waits_for[item]
        rank = ranks.pop(rng.randrange(len(ranks)))
        if not ranks:
            del self.waits_for[item]
            if isinstance(self.items[item], Backup):
                self.copy(self.items[item])
        return item, rank


class Fleet:
    def __init__(self, policy: WritePolicy, lanes: int, pages: int, host_pages: int) -> None:
        self.now = 0
        self.cache = TieredCache(
            CPSharedPagedAllocator(pages // lanes, PAGE, lanes),
            CPSharedPagedAllocator(host_pages // lanes, PAGE, lanes),
            policy=policy,
            clock=lambda: self.now,
        )
        self.scheduler = Scheduler(
            self.cache,
            chunk_size=16,
            max_running=8,
            context_length=pages // lanes * lanes * PAGE,
            vocab_size=VOCAB,
            num_ranks=lanes,
        )
        self.ranks = Ranks(PAGE, VOCAB, lanes=lanes)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenOut] = {}

    def submit(self, rid: str, prompt: list[int], max_tokens: int = 2, pin_s: int = 0) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(rid=rid, token_ids=prompt, sampling=sampling, pin_s=pin_s)
        self.see(self.scheduler.submit(request, []))

    def see(self, outs: list[TokenOut]) -> None:
        for out in outs:
            assert out.finish_reason != "error", out.error
            self.tokens.setdefault(out.rid, []).extend(out.ids)
            if out.finish_reason is not None:
                assert out.rid not in self.ends
                self.ends[out.rid] = out

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            self.see(self.scheduler.update(plan, self.ranks.execute(plan)))
        return plan is not None

    def acknowledge(self, rng: random.Random) -> None:
        if self.ranks.waits_for:
            self.scheduler.cache.acknowledge(*self.ranks.acknowledge(rng))

    def run(self, rng: random.Random) -> None:
        while self.step() or self.ranks.waits_for:
            self.acknowledge(rng)
        assert self.scheduler.is_idle and not self.cache.num_under_way
        self.cache.check()


def cold(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def serve(policy: WritePolicy, lanes: int, host_pages: int, num: int = 350) -> Fleet:
    """That many requests; each answer is the cold one."""
    rng = random.Random(f"{policy} {lanes}")
    fleet = Fleet(policy, lanes, pages=24, host_pages=host_pages)
    documents = [[rng.randrange(VOCAB) for _ in range(28)] for _ in range(12)]
    asked: dict[str, list[int]] = {}
    for i in range(num):
        document = rng.choice(documents)
        own = [rng.randrange(VOCAB)] * rng.choice([1, 1, 5, 40])
        asked[f"r{i}"] = prompt = document[: rng.randint(1, 28)] + own
        fleet.submit(f"r{i}", prompt, rng.choice([1, 2, 6]), pin_s=rng.choice([0] * 9 + [3]))
        fleet.now += rng.random() < 0.3
        for _ in range(rng.randint(0, 4)):
            fleet.step()
        for _ in range(rng.choice([0, 0, 2, 9])):
            fleet.acknowledge(rng)
        if rng.random() < 0.1:
            fleet.see(fleet.scheduler.abort(f"r{rng.randint(max(0, i - 9), i)}"))
    fleet.run(rng)
    for rid, prompt in asked.items():
        assert fleet.tokens[rid] == cold(prompt, len(fleet.tokens[rid]))
    reasons = [end.finish_reason for end in fleet.ends.values()]
    assert len(reasons) == num
    assert reasons.count("length") > 0.8 * num
    return fleet


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_hundreds_of_requests_are_answered_as_with_no_cache(policy: WritePolicy, lanes: int):
    fleet = serve(policy, lanes, host_pages=28)
    counts = fleet.cache.counts
    happened = ["loaded_back_tokens", "evicted_host_pages", "evicted_device_pages"]
    happened += ["load_backs_skipped_threshold", "load_backs_skipped_quota"]
    happened += ["pins_made", "pins_expired"]
    assert not [name for name in happened if not counts[name]], counts
    for kind in ("backups", "load_backs"):
        assert counts[f"{kind}_started"] == counts[f"{kind}_finished"]
    by_host = sum(end.cached_host_tokens for end in fleet.ends.values())
    assert 0 < by_host <= counts["loaded_back_tokens"]


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_a_host_pool_far_too_small_leaves_backups_out(lanes: int) -> None:
    counts = serve("write_through", lanes, host_pages=8, num=150).cache.counts
    assert counts["backups_skipped_no_host_pages"] > 0
    assert counts["backups_finished"] > 0
