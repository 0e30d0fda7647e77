from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.scheduler import Scheduler
from engine.types import Request, SamplingParams, TokenOut
from kvcache.allocator import CPSharedPagedAllocator
from kvcache.host_plan import WritePolicy
from kvcache.prefix_cache import PrefixCache
from kvcache.tiered_cache import TieredCache
from tests.engine.scheduler.twin import Twin, next_token

VOCAB = 50


class Harness:
    """A scheduler over a twin rank; collects what each client would have seen."""

    def __init__(self, num_pages=16, page_size=4, chunk=16, max_running=8, lanes=1, cache=None):
        self.total = num_pages * lanes
        self.cache = cache or PrefixCache(CPSharedPagedAllocator(num_pages, page_size, lanes))
        self.context_length = self.total * page_size
        self.scheduler = Scheduler(
            self.cache,
            chunk_size=chunk,
            max_running=max_running,
            context_length=self.context_length,
            vocab_size=VOCAB,
        )
        self.twin = Twin(page_size, VOCAB)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenOut] = {}

    def submit(self, rid, prompt, max_tokens=4, output=(), priority=0, pin_s=0, **sampling):
        request = Request(
            rid=rid,
            token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            priority=priority,
            pin_s=pin_s,
        )
        self.tokens[rid] = list(output)
        self.see(self.scheduler.submit(request, list(output)))

    def abort(self, rid):
        self.see(self.scheduler.abort(rid))

    def see(self, outs):
        for out in outs:
            assert out.rid not in self.ends, "told the client something after the end"
            if out.finish_reason != "error":
                assert out.index == len(self.tokens[out.rid])
            self.tokens[out.rid] += out.ids
            if out.finish_reason is not None:
                self.ends[out.rid] = out

    def step(self):
        plan = self.scheduler.plan()
        if plan is None:
            assert self.scheduler.is_idle
            return False
        self.see(self.scheduler.update(plan, self.twin.execute(plan)))
        if plan.step % 7 == 0:
            self.check_pages()
        return True

    def run(self, limit=10_000):
        for _ in range(limit):
            if not self.step():
                break
        else:
            pytest.fail("the scheduler spins")
        self.check_idle()

    def check_pages(self):
        self.cache.check()
        load = self.scheduler.load
        assert 0 <= load.free_pages + load.evictable_pages + load.locked_pages <= self.total

    def check_idle(self):
        self.check_pages()
        pinned = self.cache.pinned_pages
        assert self.cache.device.locked_pages == pinned
        assert (
            self.cache.device.free_pages + self.cache.device.evictable_pages + pinned == self.total
        )


def answer(prompt, max_tokens):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def test_one_request_over_several_chunks():
    h = Harness()
    prompt = list(range(37))
    h.submit("a", prompt, max_tokens=9)
    h.run()
    assert h.tokens["a"] == answer(prompt, 9)
    assert h.ends["a"].finish_reason == "length"
    assert max(h.twin.computed) == 16


def test_second_ask_finds_the_prefix():
    h = Harness()
    h.submit("a", range(33), max_tokens=4)
    h.run()
    h.submit("b", [*range(33), 9, 9], max_tokens=4)
    h.run()
    assert h.ends["b"].cached_tokens == 32
    assert h.tokens["b"] == answer([*range(33), 9, 9], 4)


def test_a_pinned_prompt_stays_while_others_come_and_go():
    h = Harness()
    for rid, first, pin_s in (("plain", 0, 0), ("pinned", 10, 3600)):
        h.submit(rid, range(first, first + 13), max_tokens=2, pin_s=pin_s)
        h.run()
    for i in range(6):
        h.submit(f"other{i}", [20 + i] * 30, max_tokens=2)
        h.run()
    for rid, first in (("plain again", 0), ("pinned again", 10)):
        h.submit(rid, range(first, first + 13), max_tokens=2)
        h.run()
    assert h.ends["plain again"].cached_tokens == 0
    assert h.ends["pinned again"].cached_tokens == 12
    assert h.cache.counts["pins_made"] == 1


def test_a_request_that_needs_pinned_pages_gets_them():
    """It waits for those that run, and then finds no other way."""
    h = Harness()
    h.submit("pinned", range(30), max_tokens=2, pin_s=3600)
    h.run()
    assert h.cache.pinned_pages == 7
    h.submit("running", [8] * 9, max_tokens=20)
    h.step()
    h.submit("large", [9] * 50, max_tokens=4)
    h.step()
    assert h.cache.pinned_pages == 7
    h.run()
    assert h.tokens["large"] == answer([9] * 50, 4)
    assert h.tokens["running"] == answer([8] * 9, 20)
    assert h.cache.pinned_pages == 0
    assert h.cache.counts["pins_dropped"] == 1


def test_a_pin_is_of_the_prompt_alone_also_after_a_replay():
    h = Harness(num_pages=40)
    prompt = list(range(13))
    h.submit("replayed", prompt, max_tokens=20, output=answer(prompt, 10), pin_s=3600)
    h.run()
    assert h.tokens["replayed"] == answer(prompt, 20)
    assert h.cache.pinned_pages == 3


def test_the_last_one_that_runs_takes_pinned_pages_in_the_same_step():
    """It retracts itself, and nobody else would ever bring the next step."""
    h = Harness()
    h.submit("pinned", range(30), max_tokens=2, pin_s=3600)
    h.run()
    prompt = [9] * 34
    h.submit("grows", prompt, max_tokens=6)
    h.run()
    assert h.tokens["grows"] == answer(prompt, 6)
    assert h.scheduler.counts["retracted"] == 1
    assert h.cache.counts["pins_dropped"] == 1


@pytest.mark.parametrize("policy", [None, "write_through", "write_back"])
def test_a_pin_ends_on_a_worker_that_has_nothing_to_do(policy: WritePolicy | None):
    now = [0]
    pages = CPSharedPagedAllocator(16, 4)
    cache = PrefixCache(pages, clock=lambda: now[0])
    if policy is not None:
        host = CPSharedPagedAllocator(16, 4)
        cache = TieredCache(pages, host, policy=policy, clock=lambda: now[0])
    h = Harness(cache=cache)
    [page] = cache.device.alloc(1)
    inserted = cache.insert([1, 2, 3, 4], [page])
    cache.lock(inserted.node)
    assert cache.pin(inserted.node, 5)
    cache.unlock(inserted.node)
    now[0] = 4
    h.scheduler.plan()
    assert h.scheduler.cache.pinned_pages == 1
    now[0] = 5
    h.scheduler.plan()
    assert h.scheduler.cache.pinned_pages == 0
    assert h.scheduler.cache.counts["pins_expired"] == 1


def test_identical_prompts_submitted_together_are_computed_once():
    h = Harness(num_pages=32)
    prompt = list(range(32))
    for rid in "abc":
        h.submit(rid, prompt, max_tokens=3)
    h.run()
    assert all(h.tokens[rid] == answer(prompt, 3) for rid in "abc")
    prefill = sum(h.twin.computed) - 3 * 2
    assert prefill == 32 + 2 * 4  # the last page is computed again for its logits


def test_pool_too_small_for_all_retracts_and_loses_nothing():
    h = Harness(num_pages=12, chunk=8, max_running=6)
    prompts = {f"r{i}": [i, i + 1, i + 2] for i in range(6)}
    for rid, prompt in prompts.items():
        h.submit(rid, prompt, max_tokens=24)
    h.run()
    assert h.scheduler.counts["retracted"] > 0
    for rid, prompt in prompts.items():
        assert h.tokens[rid] == answer(prompt, 24), rid


def test_stop_token_ends_and_min_tokens_delays_it():
    prompt = [3, 1, 4]
    tokens = answer(prompt, 8)
    stop = tokens[2]
    h = Harness()
    h.submit("a", prompt, max_tokens=8, stop_token_ids=(stop,))
    h.run()
    first = tokens.index(stop)
    assert h.tokens["a"] == tokens[: first + 1]
    assert h.ends["a"].finish_reason == "stop" and h.ends["a"].stop_token
    h.submit("b", prompt, max_tokens=8, stop_token_ids=(stop,), min_tokens=8)
    h.run()
    assert h.tokens["b"] == tokens and h.ends["b"].finish_reason == "length"


def test_max_tokens_zero_computes_the_prompt_only():
    h = Harness()
    h.submit("a", range(10), max_tokens=0)
    h.run()
    assert h.tokens["a"] == [] and h.ends["a"].finish_reason == "length"


def test_replay_continues_where_the_client_is():
    h = Harness()
    prompt = [5, 6, 7]
    whole = answer(prompt, 12)
    h.submit("a", prompt, max_tokens=12, output=whole[:5])
    h.run()
    assert h.tokens["a"] == whole
    h.submit("b", prompt, max_tokens=5, output=whole[:5])
    assert h.ends["b"].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "kwargs", "said"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, f"token id {VOCAB}"),
        ([-1], {}, "token id -1"),
        ([1] * 60, {"max_tokens": 5}, "context length of 64"),
        ([1], {"logit_bias": {99: 1.0}}, "token id 99"),
    ],
)
def test_what_cannot_be_served_ends_alone(prompt, kwargs, said):
    h = Harness()
    h.submit("good", [1, 2, 3])
    h.submit("bad", prompt, **kwargs)
    assert h.ends["bad"].finish_reason == "error" and said in h.ends["bad"].error
    h.run()
    assert h.tokens["good"] == answer([1, 2, 3], 4)


def test_duplicate_rid_is_refused_and_the_first_goes_on():
    h = Harness()
    h.submit("a", [1, 2, 3])
    outs = h.scheduler.submit(
        Request(rid="a", token_ids=[9], sampling=SamplingParams(max_tokens=1)), []
    )
    assert outs[0].finish_reason == "error" and "'a'" in outs[0].error
    h.run()
    assert h.tokens["a"] == answer([1, 2, 3], 4)


def test_prompt_of_exactly_the_pool_is_served():
    h = Harness(num_pages=8)
    h.submit("a", range(31), max_tokens=1)
    h.run()
    assert h.tokens["a"] == answer(range(31), 1)


def test_long_prompt_and_short_ones_behind_it_both_advance():
    h = Harness(num_pages=64, chunk=8)
    h.submit("long", [i % VOCAB for i in range(160)], max_tokens=1)
    h.step()
    for i in range(20):
        h.submit(f"s{i}", [i, 40, i], max_tokens=1)
    steps = 1
    while "long" not in h.ends:
        assert h.step()
        steps += 1
    assert steps <= 2 * 160 // 8  # at least half of every step
    assert len(h.ends) > 10  # and the short ones did not wait for it
    h.run()


def test_higher_priority_overtakes_in_the_queue():
    h = Harness(max_running=1)
    h.submit("running", [1, 2], max_tokens=8)
    h.step()
    h.submit("low", [3], max_tokens=1)
    h.submit("high", [4], max_tokens=1, priority=5)
    while len(h.ends) < 2:
        h.step()
    assert list(h.ends) == ["running", "high"]
    h.run()


def test_failed_step_ends_its_requests_only():
    h = Harness(max_running=1)
    h.submit("a", [1, 2])
    h.submit("b", [3, 4])
    assert h.scheduler.plan() is not None
    h.see(h.scheduler.fail_step("broken"))
    assert h.ends["a"].error == "broken"
    h.run()
    assert h.tokens["b"] == answer([3, 4], 4)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), lanes=st.sampled_from([1, 2, 4]))
def test_random_traffic_answers_as_if_alone(seed, lanes):
    rng = random.Random(seed)
    h = Harness(
        num_pages=rng.randint(8, 24) // lanes + 1,
        page_size=rng.choice([1, 2, 4]),
        chunk=rng.choice([1, 3, 8, 32]),
        max_running=rng.randint(1, 6),
        lanes=lanes,
    )
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 20))] for _ in range(3)]
    wanted: dict[str, tuple[list[int], int]] = {}
    for i in range(25):
        room = h.context_length
        prompt = [*rng.choice(prefixes), rng.randrange(VOCAB)][-(room - 1) :]
        max_tokens = rng.randint(1, min(12, room - len(prompt)))
        wanted[f"r{i}"] = (prompt, max_tokens)
        h.submit(f"r{i}", prompt, max_tokens, priority=rng.choice([0, 0, 1]))
        for _ in range(rng.randint(0, 4)):
            h.step()
        if rng.random() < 0.2:
            h.abort(rng.choice(list(wanted)))
    h.run()
    for rid, (prompt, max_tokens) in wanted.items():
        expected = answer(prompt, max_tokens)
        if h.ends[rid].finish_reason == "abort":
            assert h.tokens[rid] == expected[: len(h.tokens[rid])]
        else:
            assert h.tokens[rid] == expected


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), lanes=st.sampled_from([1, 2, 3]))
def test_requests_of_any_length_that_fits_are_served_whatever_the_lanes_hold(seed, lanes):
    """Up to the whole pool, with prefixes in common: pages of a request then lie unevenly."""
    rng = random.Random(seed)
    h = Harness(num_pages=rng.randint(2, 4), chunk=rng.choice([4, 8, 64]), lanes=lanes)
    room = h.context_length
    text = [rng.randrange(VOCAB) for _ in range(room)]
    wanted = {}
    for i in range(rng.randint(2, 5)):
        own = [rng.randrange(VOCAB) for _ in range(room)]
        prompt = (text[: rng.choice([0, 4, 8])] + own)[: rng.randint(1, room - 1)]
        wanted[f"r{i}"] = (prompt, rng.randint(1, room - len(prompt)))
        h.submit(f"r{i}", *wanted[f"r{i}"])
        for _ in range(rng.randint(0, 6)):
            h.step()
    h.run()
    for rid, (prompt, max_tokens) in wanted.items():
        assert h.tokens[rid] == answer(prompt, max_tokens)


def test_one_page_requests_are_spread_over_the_lanes():
    h = Harness(num_pages=16, lanes=2, max_running=12)
    for i in range(12):
        h.submit(f"r{i}", [i, i + 1, i + 2, i + 3, i + 4, i + 5], max_tokens=1)
    h.run()
    used = h.scheduler.cache.device.used_by_lane()
    assert sum(used) == 12 and max(used) - min(used) <= 2
