"""Handed over equals colocated, byte for byte and token for token; whatever ends a room early, all
pages come back, and none while bytes may still come into it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.channel import Disconnected
from engine.handoff.decode_side import GONE_LOOKS, LEASE_LOOKS
from engine.messages import Abort, Alive, Handoff, Hello, Prefill, RoomClosed
from engine.peers import LOOK_S, MAX_SILENT_LOOKS
from kvcache.transfer.base import LATE_BYTES_S
from kvcache.transfer.digest import page_digest
from kvcache.transfer.loopback import LoopbackEngine, LoopbackNetwork
from tests.engine.apart import run_apart
from tests.engine.client import Client
from tests.engine.handoff.pair import DECODE, FRONT, PREFILL, Pair
from tests.identity import MODEL_ID
from tests.tiny import SAVES, save_dsa

PAGE = 64
HELLO = Hello(
    instance_id="", role="prefill", pid=1, host="", model="", vocab_size=199, context_length=1024,
    page_size=PAGE, total_pages=16, model_id=MODEL_ID,
)  # fmt: skip
LENGTHS = (1, 2, 63, 64, 65, 130, 300)
POOL = {"max_total_tokens": 16 * PAGE, "chunked_prefill_size": 100}


def prompt(num: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + 13 * i + 31 * seed) % 190 + 3 for i in range(num)]


@pytest.fixture(scope="module")
def dsa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dsa(tmp_path_factory.mktemp("dsa"))


@pytest.fixture
def pair(dsa: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Over the twin of the transfer engine."""
    network = LoopbackNetwork()
    monkeypatch.setattr("engine.loading.MooncakeEngine", lambda host, protocol: network.engine())
    pair = Pair(dsa, prefill=POOL, decode=POOL)
    yield pair
    pair.close()


def sender(pair: Pair) -> LoopbackEngine:
    engine = pair.prefill.engine.leader.transfer
    assert isinstance(engine, LoopbackEngine)
    return engine


def requests() -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Of every length; shared prefixes; each way to choose tokens."""
    asked: dict[str, tuple[list[int], dict[str, Any]]] = {
        f"greedy-{n}": (prompt(n, n), {"temperature": 0.0}) for n in LENGTHS
    }
    asked["again"] = ([*prompt(300, 300)[:200], 5, 6, 7], {"temperature": 0.0})
    asked["seeded"] = (prompt(90, 1), {"temperature": 0.8, "seed": 7, "top_p": 0.9})
    asked["penalties"] = (
        prompt(70, 2),
        {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    )
    asked["scored"] = (prompt(140, 3), {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2})
    return asked


def alone(folder: Path, asked: dict[str, tuple[list[int], dict[str, Any]]]) -> Client:
    client = Client(folder, max_total_tokens=32 * PAGE)
    for rid, (token_ids, sampling) in asked.items():
        client.submit(rid, token_ids, **sampling)
        client.run()
    return client


@pytest.mark.parametrize(
    ("kind", "cp_size"), [("dsa", 1), ("dsa", 2), ("dsa", 3), ("mla", 2), ("gqa", 3)]
)
def test_handed_over_equals_colocated(tmp_path: Path, kind: str, cp_size: int) -> None:
    """Over the real engine, with real ranks."""
    model = SAVES[kind](tmp_path)
    asked = requests()
    expected = alone(model, asked)
    pair = Pair(model, prefill={**POOL, "cp_size": cp_size}, decode={"max_total_tokens": 2048})
    try:
        for together in (list(asked), list(asked)[::-1]):  # the second time all is cached
            pair.outs.clear()
            for rid in together:
                token_ids, sampling = asked[rid]
                pair.submit(rid, token_ids, room=f"{rid}-{together[0]}", **sampling)
            pair.run()
            assert pair.from_decode == set(asked)
            for rid in asked:
                assert pair.tokens(rid) == expected.tokens[rid], rid
                assert pair.end(rid).finish_reason == expected.ends[rid].finish_reason
            pair.assert_all_given_back()
        scored = [lp for out in pair.outs["scored"] for lp in out.logprobs]
        assert [lp.token_id for lp in scored] == pair.tokens("scored")
        for got, want in zip(scored, expected.logprobs["scored"], strict=True):
            assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert len(pair.outs["scored"][0].prompt_logprobs) == 140
        sent = pair.prefill.scheduler.prefill_side.pages_sent
        assert all(sent), f"a rank has sent nothing: {sent}"
        assert not pair.hand_backs
    finally:
        pair.close()


def test_handed_over_to_one_that_runs_ahead(dsa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: requests arrive while a step is under way that knows nothing of them."""
    network = LoopbackNetwork()
    monkeypatch.setattr("engine.loading.MooncakeEngine", lambda host, protocol: network.engine())
    asked = requests()
    expected = alone(dsa, asked)
    run_apart(monkeypatch)
    pair = Pair(dsa, prefill=POOL, decode={"max_total_tokens": 12 * PAGE})
    for rid, (token_ids, sampling) in asked.items():
        pair.submit(rid, token_ids, **sampling)
        pair.turn()
        pair.turn()
    pair.run()
    assert pair.from_decode == set(asked) and not pair.hand_backs
    assert {rid: pair.tokens(rid) for rid in asked} == expected.tokens
    counts = pair.decode.engine.leader.runner.ahead_counts
    assert counts["taken"] > 0 and counts["dropped"] > 0
    pair.assert_all_given_back()
    pair.close()


def test_every_page_arrives_once_and_whole(pair: Pair) -> None:
    prompts = {f"r{i}": prompt(n, i) for i, n in enumerate(LENGTHS * 10)}
    for rid, token_ids in prompts.items():
        pair.submit(rid, token_ids, max_tokens=2, temperature=0.0)
    ours, theirs = pair.prefill.engine.leader.pool, pair.decode.engine.leader.pool
    asked: dict[str, Prefill] = {}
    pages: dict[str, list[int]] = {}
    checked: set[str] = set()

    def check() -> None:
        for message in pair.to_decode:  # all has landed, nothing was written since
            wanted = asked[message.room].reservation
            its = pages[message.room][wanted.first_position :]
            for source, destination in zip(its, wanted.dst_pages, strict=True):
                assert page_digest(ours, source) == page_digest(theirs, destination)
            checked.add(message.room)

    pair.prefill.before_step = check
    while not (pair.prefill.scheduler.is_idle and pair.decode.scheduler.is_idle):
        pair.decode.turn()
        asked |= {m.room: m for m in pair.to_prefill if isinstance(m, Prefill)}
        pair.deliver()
        pair.prefill.turn()
        for room, req in pair.prefill.scheduler.prefill_side._rooms.items():
            pages[room] = list(req.pages)
    assert len(checked) == len(prompts)
    num_wanted = sum(len(message.reservation.dst_pages) for message in asked.values())
    assert sum(pair.prefill.scheduler.prefill_side.pages_sent) == num_wanted
    pair.assert_all_given_back()


def test_what_decode_has_cached_is_not_sent(pair: Pair) -> None:
    pair.submit("first", prompt(200), temperature=0.0)
    pair.run()
    before = sum(pair.prefill.scheduler.prefill_side.pages_sent)
    pair.submit("second", [*prompt(200), *pair.tokens("first"), *prompt(30, 9)], temperature=0.0)
    pair.run()
    # 200 + 12 + 30 tokens are 4 pages; three, with the answer of the first, lie there already.
    assert sum(pair.prefill.scheduler.prefill_side.pages_sent) - before == 1
    pair.assert_all_given_back()


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"stop_token_ids": tuple(range(199))}])
def test_an_answer_that_ends_at_its_first_token_is_not_handed_over(
    pair: Pair, sampling: dict[str, Any]
) -> None:
    pair.submit("r", prompt(100), temperature=0.0, **sampling)
    pair.run()
    assert len(pair.tokens("r")) == 1 and not pair.from_decode
    assert pair.decode.scheduler.counts["handed_over"] == 0
    assert not pair.hand_backs
    pair.assert_all_given_back()


@pytest.mark.parametrize("num_turns", range(9))
def test_an_abort_at_any_moment_gives_all_back(pair: Pair, num_turns: int) -> None:
    pair.submit("r", prompt(250), max_tokens=30, temperature=0.0)
    pair.submit("other", prompt(120, 5), temperature=0.0)
    for _ in range(num_turns):
        pair.turn()
    pair.abort("r")
    pair.run()
    assert len(pair.tokens("other")) == 12
    pair.assert_all_given_back()


def test_pages_stay_fenced_until_the_sender_is_quiet(pair: Pair) -> None:
    stall = sender(pair).stall_next()
    pair.submit("r", prompt(64), temperature=0.0)
    while not stall.reached.is_set():
        pair.turn()
    pair.abort("r")
    for _ in range(5):
        pair.turn()
    assert pair.decode.scheduler.load.fenced_pages == 2
    assert pair.prefill.scheduler.load.num_rooms == 1, "its pages are still read"
    stall.release()
    pair.run()
    while pair.decode.scheduler.load.fenced_pages:
        pair.turn()
    pair.assert_all_given_back()


def test_a_failed_write_is_tried_again(pair: Pair) -> None:
    sender(pair).fail_next(1)
    pair.submit("r", prompt(70), temperature=0.0)
    pair.run()
    assert len(pair.tokens("r")) == 12 and not pair.hand_backs
    pair.assert_all_given_back()


def test_two_failed_writes_hand_the_request_back(pair: Pair) -> None:
    sender(pair).fail_next(2)
    pair.submit("r", prompt(70), temperature=0.0)
    while not pair.hand_backs:
        pair.turn()
    pair.submit("other", prompt(30, 4), temperature=0.0, max_tokens=3)
    pair.run()
    assert len(pair.tokens("other")) == 3
    assert {(m.rid, m.attempt) for m in pair.hand_backs} == {("r", 0)}
    assert "told to fail" in pair.hand_backs[0].reason
    assert pair.decode.scheduler.load.fenced_pages == 2, "bytes may still come"
    for _ in range(LEASE_LOOKS):
        assert pair.decode.scheduler.load.fenced_pages == 2
        pair.look()
    assert pair.decode.scheduler.load.fenced_pages == 0
    pair.submit("r", prompt(70), attempt=1, temperature=0.0)
    pair.run()
    assert pair.end("r").attempt == 1
    pair.assert_all_given_back()


def test_a_lost_prefill_group_hands_back_and_fences(pair: Pair) -> None:
    stall = sender(pair).stall_next()
    pair.submit("r", prompt(64), temperature=0.0)
    while not stall.reached.is_set():
        pair.turn()
    pair.decode.inbox.take(PREFILL, Disconnected())
    pair.decode.inbox.send_notes()
    assert [m.rid for m in pair.hand_backs] == ["r"]
    assert pair.decode.scheduler.load.fenced_pages == 2
    for _ in range(LEASE_LOOKS):
        pair.look()
    assert pair.decode.scheduler.load.fenced_pages == 0
    stall.release()


def test_a_decode_worker_that_was_held_up_is_known_again_while_pages_are_fenced(
    pair: Pair,
) -> None:
    """The group has missed it, and takes nothing any more over the connection that they had."""
    for _ in range(MAX_SILENT_LOOKS + 1):
        pair.prefill.inbox.take(FRONT, Alive())
        pair.prefill.inbox.look()
    pair.submit("r", prompt(64), temperature=0.0)
    for _ in range(MAX_SILENT_LOOKS + 1):
        pair.turn()
        pair.decode.inbox.take(FRONT, Alive())
        pair.decode.inbox.look()
    pair.decode.inbox.send_notes()
    assert [m.reason for m in pair.hand_backs] == ["the prefill group is gone"]
    assert pair.decode.scheduler.load.fenced_pages == 2
    pair.submit("r", prompt(64), attempt=1, temperature=0.0)
    pair.run()
    assert pair.end("r").attempt == 1


def test_a_lost_decode_worker_frees_the_prefill_side(pair: Pair) -> None:
    pair.submit("r", prompt(250), temperature=0.0)
    pair.turn()
    pair.turn()
    assert pair.prefill.scheduler.load.num_rooms == 1
    pair.prefill.scheduler.prefill_side.lose_decode("decode")
    while not pair.prefill.scheduler.is_idle:
        pair.prefill.turn()
    assert [m.rid for m in pair.hand_backs] == ["r"]
    pair.prefill.assert_all_given_back()


def test_unknown_and_duplicate_rooms_are_refused_and_counted(pair: Pair) -> None:
    pair.decode.inbox.take(PREFILL, Handoff(room="nowhere", token_id=3))
    pair.decode.inbox.take(PREFILL, RoomClosed(room="nowhere"))
    assert pair.decode.inbox.refused["unknown_room"] == 2
    pair.submit("r", prompt(250), temperature=0.0)
    pair.decode.turn()
    (asked,) = pair.to_prefill
    pair.deliver()
    pair.prefill.inbox.take(DECODE, asked)
    assert pair.prefill.inbox.refused["duplicate_room"] == 1
    pair.submit("s", prompt(20), room="room-r-0", temperature=0.0)
    assert pair.decode.inbox.refused["duplicate_room"] == 1
    assert [m.rid for m in pair.hand_backs] == ["s"]
    pair.run()
    assert len(pair.tokens("r")) == 12
    pair.assert_all_given_back()


def test_a_room_is_taken_from_its_submission_on(pair: Pair) -> None:
    """Also while its request waits for pages."""
    pair.submit("big", prompt(900), max_tokens=40, temperature=0.0)
    pair.turn()
    pair.submit("a", prompt(300, 1), room="same", temperature=0.0)
    pair.submit("b", prompt(300, 2), room="same", temperature=0.0)
    assert pair.decode.scheduler.load.num_waiting == 1
    assert pair.decode.inbox.refused["duplicate_room"] == 1
    assert [m.rid for m in pair.hand_backs] == ["b"]
    pair.abort("big")
    pair.run()
    assert len(pair.tokens("a")) == 12
    pair.submit("c", prompt(30), room="same", temperature=0.0)
    pair.run()
    assert len(pair.tokens("c")) == 12, "it is free again"
    pair.assert_all_given_back()


def test_a_request_that_fills_the_context_is_refused_not_reserved(pair: Pair) -> None:
    pair.submit("r", prompt(16 * PAGE), max_tokens=0, temperature=0.0)
    pair.run()
    assert "nothing to decode" in pair.end("r").error
    pair.assert_all_given_back()


def test_a_request_id_in_use_does_not_change_its_owner(pair: Pair) -> None:
    pair.submit("r", prompt(250), temperature=0.0)
    pair.turn()
    pair.submit("r", prompt(30), room="another", temperature=0.0)
    assert pair.decode.inbox.refused["request_id"] == 1
    pair.run()
    assert len(pair.tokens("r")) == 12
    pair.assert_all_given_back()


def test_a_lease_outlasts_all_late_bytes() -> None:
    assert LEASE_LOOKS * LOOK_S >= LATE_BYTES_S
    assert GONE_LOOKS * LOOK_S < LATE_BYTES_S


def test_another_process_at_the_address_shortens_the_lease(pair: Pair) -> None:
    stall = sender(pair).stall_next()
    pair.submit("r", prompt(64), temperature=0.0)
    while not stall.reached.is_set():
        pair.turn()
    pair.decode.inbox.take(PREFILL, Disconnected())
    pair.decode.inbox.send_notes()
    assert pair.decode.scheduler.load.fenced_pages == 2
    for instance in ("first", "second"):  # what was there, as it was heard, and what is now
        pair.decode.inbox.take(PREFILL, replace(HELLO, instance_id=instance))
    for _ in range(GONE_LOOKS):
        assert pair.decode.scheduler.load.fenced_pages == 2
        pair.look()
    assert pair.decode.scheduler.load.fenced_pages == 0
    stall.release()


@pytest.mark.parametrize("fault", ["geometry", "weights", "dtype", "page", "too few", "frontend"])
def test_a_reservation_that_does_not_fit_is_refused(pair: Pair, fault: str) -> None:
    pair.submit("r", prompt(100), temperature=0.0)
    pair.decode.turn()
    asked = pair.to_prefill.popleft()
    wanted = asked.reservation
    model_id = pair.prefill.engine.model_id
    in_bfloat16 = replace(model_id, numbers=replace(model_id.numbers, weights="bfloat16"))
    other = tuple(replace(buffer, dtype="x") for buffer in wanted.pool.buffers)
    wrong = {
        "geometry": replace(
            asked, reservation=replace(wanted, pool=replace(wanted.pool, buffers=other))
        ),
        "weights": replace(
            asked, reservation=replace(wanted, model_id=replace(model_id, fingerprint="0f"))
        ),
        "dtype": replace(asked, reservation=replace(wanted, model_id=in_bfloat16)),
        "page": replace(asked, reservation=replace(wanted, dst_pages=[1, 10_000])),
        "too few": replace(asked, reservation=replace(wanted, dst_pages=[1])),
        "frontend": replace(asked, frontend="nobody"),
    }[fault]
    pair.to_prefill.append(wrong)
    pair.run()
    (back,) = pair.hand_backs
    said = {
        "geometry": "bytes of x",
        "weights": f"here {model_id.fingerprint} in float32, there 0f in float32",
        "dtype": f"there {model_id.fingerprint} in bfloat16",
        "page": "page 10000 is outside the pool",
        "too few": "pages 0 to 1 of 2",
        "frontend": "not connected",
    }
    assert said[fault] in back.reason
    if fault == "geometry":
        assert "bytes of float32" in back.reason, "both records are named"
    assert sum(pair.prefill.inbox.refused.values()) == 1
    pair.assert_all_given_back()


def test_a_later_attempt_overtakes_the_abort_of_the_earlier(pair: Pair) -> None:
    pair.submit("r", prompt(250), temperature=0.0)
    pair.turn()
    pair.decode.inbox.take(  # the decode worker has the abort, the prefill group has not yet
        FRONT, Abort("r", 0)
    )
    pair.submit("r", prompt(250), attempt=1, temperature=0.0)
    pair.turn()
    pair.deliver()
    pair.prefill.inbox.take(FRONT, Abort("r", 0))
    pair.run()
    assert [out.attempt for out in pair.outs["r"] if out.ids] == [1] * 12
    pair.assert_all_given_back()


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_ends_with_nothing_left(dsa: Path, pair: Pair, seed: int) -> None:
    """More than the pools hold, aborts, failures, stalls: what is answered is right, all is given
    back."""
    draw = random.Random(seed)
    expected = alone(dsa, {f"{n}": (prompt(n, n), {"temperature": 0.0}) for n in LENGTHS})
    live: dict[str, int] = {}
    aborted: set[str] = set()
    for number in range(40):
        length = draw.choice(LENGTHS)
        rid = f"r{number}"
        pair.submit(rid, prompt(length, length), temperature=0.0)
        live[rid] = length
        if draw.random() < 0.1:
            sender(pair).fail_next(1)
        for _ in range(draw.randrange(4)):
            pair.turn()
        if draw.random() < 0.25:
            victim = draw.choice(sorted(live))
            pair.abort(victim)
            aborted.add(victim)
    pair.run()
    while pair.decode.scheduler.load.fenced_pages:
        pair.turn()
        pair.look()
    lost = {message.rid for message in pair.hand_backs}
    for rid, length in live.items():
        if rid not in aborted and rid not in lost:
            assert pair.tokens(rid) == expected.tokens[f"{length}"], rid
    pair.assert_all_given_back()


def test_a_pinned_prefix_stays_on_both_sides(pair: Pair) -> None:
    pair.submit("pinned", prompt(300), temperature=0.0, pin_s=3600)
    pair.run()
    for node in (pair.prefill, pair.decode):
        assert node.scheduler.cache.pinned_pages == 300 // PAGE
    for i in range(1, 6):
        pair.submit(f"other {i}", prompt(11 * PAGE, seed=i), temperature=0.0)
        pair.run()
    pair.submit("again", prompt(300), temperature=0.0)
    pair.run()
    assert pair.tokens("again") == pair.tokens("pinned")
    assert pair.outs["again"][0].cached_tokens == 4 * PAGE
    for node in (pair.prefill, pair.decode):
        assert node.scheduler.cache.counts["pins_dropped"] == 0
        assert node.scheduler.cache.pinned_pages == 300 // PAGE
        node.scheduler.cache.drop_pins()
    pair.assert_all_given_back()
