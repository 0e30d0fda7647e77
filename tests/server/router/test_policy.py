"""Policies: what each prefers, what it never does, and that nobody is starved or flooded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.router.policy import LIVE_TOKENS, POLICIES, TRANSFER_DISCOUNT, Candidate, Policy

PAGE = 64
IDLE = Candidate(
    key="a",
    role="prefill",
    num_live=0,
    live_tokens=0,
    waiting_tokens=0,
    num_running=0,
    free_pages=1000,
    total_pages=1000,
    page_size=PAGE,
    matched_pages=0,
    is_overloaded=False,
)
ROLES = ("prefill", "decode", "colocated")
prefix, least_loaded, round_robin = POLICIES.values()
EACH = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))


def fleet(*changes: dict[str, int | bool], role: str = "prefill") -> list[Candidate]:
    """Workers a, b, ...; each idle but for its changes."""
    return [
        replace(IDLE, key=chr(97 + i), role=role, **change)  # type: ignore[arg-type]
        for i, change in enumerate(changes)
    ]


def candidates(role: str) -> st.SearchStrategy[list[Candidate]]:
    one = st.builds(
        Candidate,
        key=st.text("abcdefgh", min_size=3, max_size=3),
        role=st.just(role),
        num_live=st.integers(0, 3),
        live_tokens=st.integers(0, 3000),
        waiting_tokens=st.integers(0, 3000),
        num_running=st.integers(0, 3),
        free_pages=st.integers(0, 60),
        total_pages=st.integers(1, 60),
        page_size=st.just(PAGE),
        matched_pages=st.integers(0, 30),
        is_overloaded=st.booleans(),
    )
    return st.lists(one, max_size=5, unique_by=lambda candidate: candidate.key)


ANY = st.sampled_from(ROLES).flatmap(candidates)


@EACH
@given(found=ANY, num_tokens=st.integers(0, 4000), turn=st.integers(0, 20), data=st.data())
def test_what_every_policy_keeps(
    policy: Policy, found: list[Candidate], num_tokens: int, turn: int, data: st.DataObject
) -> None:
    able = {
        c.key: c
        for c in found
        if num_tokens + (0 if c.role == "prefill" else 1) <= c.total_pages * PAGE
    }
    key = policy(found, num_tokens, turn)
    assert (key is None) == (not able)
    if key is not None:
        assert key in able
        if not all(c.is_overloaded for c in able.values()):
            assert not able[key].is_overloaded
        shuffled = data.draw(st.permutations(found))
        assert policy(shuffled, num_tokens, turn) == key


@pytest.mark.parametrize("policy", [prefix, least_loaded], ids=["prefix", "least-loaded"])
@given(found=ANY, num_tokens=st.integers(0, 4000), turn=st.integers(0, 20))
def test_the_chosen_one_is_not_worse_in_everything(
    policy: Policy, found: list[Candidate], num_tokens: int, turn: int
) -> None:
    key = policy(found, num_tokens, turn)
    if key is None:
        return
    chosen = next(c for c in found if c.key == key)
    for other in found:
        is_better = (
            other.is_overloaded <= chosen.is_overloaded
            and other.total_pages >= chosen.total_pages
            and other.num_live < chosen.num_live
            and other.num_running < chosen.num_running
            and other.live_tokens < chosen.live_tokens
            and other.waiting_tokens < chosen.waiting_tokens
            and other.free_pages >= chosen.free_pages
            and other.matched_pages >= chosen.matched_pages
        )
        assert not is_better


@EACH
@pytest.mark.parametrize("role", ROLES)
def test_equal_workers_take_turns(policy: Policy, role: str) -> None:
    equal = fleet({}, {}, {}, role=role)
    assert [policy(equal, 100, turn) for turn in range(6)] == ["a", "b", "c"] * 2


@EACH
def test_nobody_there_or_a_prompt_too_long_for_all(policy: Policy) -> None:
    assert policy([], 10, 0) is None
    assert policy(fleet({"total_pages": 2}), 2 * PAGE, 0) == "a"
    assert policy(fleet({"total_pages": 2}), 2 * PAGE + 1, 0) is None
    assert policy(fleet({"total_pages": 2}, role="decode"), 2 * PAGE, 0) is None
    only_b = fleet({"total_pages": 2}, {"is_overloaded": True})
    assert policy(only_b, 2 * PAGE + 1, 0) == "b"


@EACH
def test_where_all_are_overloaded_the_least_loaded_takes_it(policy: Policy) -> None:
    full = {"is_overloaded": True}
    busy = {**full, "waiting_tokens": 500, "matched_pages": 7}
    assert [policy(fleet(busy, full), 1000, turn) for turn in (0, 1)] == ["b", "b"]


def test_round_robin_passes_over_the_overloaded() -> None:
    workers = fleet({}, {"is_overloaded": True}, {"num_live": 9, "waiting_tokens": 9999})
    assert [round_robin(workers, 100, turn) for turn in range(4)] == ["a", "c", "a", "c"]


def test_least_loaded_does_not_look_at_the_prefix() -> None:
    assert least_loaded(fleet({"matched_pages": 15, "waiting_tokens": 1}, {}), 1000, 0) == "b"
    assert prefix(fleet({"matched_pages": 15, "waiting_tokens": 1}, {}), 1000, 1) == "a"


@pytest.mark.parametrize("field", ["live_tokens", "waiting_tokens"])
def test_a_prefill_goes_where_the_fewest_tokens_are_before_its_first(field: str) -> None:
    saved = 10 * PAGE
    for queued, expected in [(saved - 1, "a"), (saved + 1, "b")]:
        assert prefix(fleet({"matched_pages": 10, field: queued}, {}), 5000, 1) == expected
    tie = fleet({"matched_pages": 10, field: saved, "num_live": 1}, {})
    assert prefix(tie, 5000, 0) == "b"  # fewer live requests


def test_a_cached_prompt_longer_than_the_prompt_is_worth_no_more() -> None:
    assert prefix(fleet({"matched_pages": 9}, {"matched_pages": 1}), PAGE, 1) == "b"


def test_colocated_decodes_weigh_against_the_prefix() -> None:
    saved = 8 * LIVE_TOKENS // PAGE
    for num_live, expected in [(7, "a"), (9, "b")]:
        workers = fleet({"matched_pages": saved, "num_live": num_live}, {}, role="colocated")
        assert prefix(workers, 5000, 1) == expected


def test_a_decode_worker_is_chosen_by_its_requests_then_by_pages_to_send() -> None:
    workers = fleet({"matched_pages": 3}, {"matched_pages": 10}, role="decode")
    assert prefix(workers, 5000, 0) == "b"
    saved = LIVE_TOKENS * TRANSFER_DISCOUNT // PAGE  # pages worth one request
    for extra, expected in [(-1, "a"), (1, "b")]:
        held = {"matched_pages": saved + extra, "num_running": 1}
        assert prefix(fleet({}, held, role="decode"), 20_000, 0) == expected


@pytest.mark.parametrize("policy", [prefix, least_loaded], ids=["prefix", "least-loaded"])
@pytest.mark.parametrize("role", ["decode", "colocated"])
def test_a_worker_without_room_for_the_prompt_comes_last(policy: Policy, role: str) -> None:
    no_room = {"free_pages": 5, "matched_pages": 4}
    workers = fleet(no_room, {"num_live": 50}, role=role)
    assert policy(workers, 9 * PAGE - 1, 0) == "a"  # 9 pages, 4 of them cached
    assert policy(workers, 9 * PAGE, 0) == "b"
    assert policy(workers[:1], 9 * PAGE, 0) == "a"


@pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
@pytest.mark.parametrize(("role", "most"), [("prefill", 0), ("colocated", 0), ("decode", 1)])
def test_a_prompt_may_fill_a_pool_where_nothing_need_follow(
    policy: Policy, role: str, most: int
) -> None:
    workers = fleet({}, role=role)
    num_tokens = workers[0].total_pages * PAGE
    assert policy(workers, num_tokens - most, 0) == "a"
    assert policy(workers, num_tokens - most + 1, 0) is None


def serve(num_requests: int, role: str, shared: int, own: int) -> list[str]:
    """Requests that share a prefix which only worker a holds at first and that come faster than
    any is done."""
    workers = fleet({"matched_pages": shared // PAGE}, {}, {}, {}, role=role)
    chosen = []
    for turn in range(num_requests):
        key = prefix(workers, shared + own, turn)
        assert key is not None
        chosen.append(key)
        place = ord(key) - 97
        worker = workers[place]
        uncached = shared + own - worker.matched_pages * PAGE
        workers[place] = replace(
            worker,
            num_live=worker.num_live + 1,
            live_tokens=worker.live_tokens + uncached,
            matched_pages=shared // PAGE,
        )
    return chosen


@pytest.mark.parametrize("role", ROLES)
def test_a_prefix_that_all_share_does_not_gather_them_on_one_worker(role: str) -> None:
    chosen = serve(400, role, shared=100 * PAGE, own=2 * PAGE)
    assert chosen[0] == "a"
    counts = Counter(chosen)
    assert len(counts) == 4
    # No worker is ahead of another by more than what the prefix alone is worth.
    worth = 100 * PAGE // (2 * PAGE)
    assert max(counts.values()) - min(counts.values()) <= worth + 1


def test_conversations_stay_where_their_prefix_is() -> None:
    for turn in range(10):
        for home in range(4):
            changes: list[dict[str, int | bool]] = [{"num_live": 2} for _ in range(4)]
            changes[home]["matched_pages"] = 30
            for role in ROLES:
                assert prefix(fleet(*changes, role=role), 40 * PAGE, turn) == "abcd"[home]
