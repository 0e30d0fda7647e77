"""Each stage's time goes into the right family and the right span, and no end leaves anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import stopwatch as families
from engine.handoff.room import Reservation
from engine.messages import (
    Abort,
    CloseRoom,
    HandBack,
    Handoff,
    Heartbeat,
    Prefill,
    Register,
    RoomClosed,
    Route,
    Submit,
)
from engine.stopwatch import Stopwatch
from engine.tracing import Attributes, NoTracer
from engine.types import FinishReason, MetricFamily, Request, SamplingParams, TokenOut
from kvcache.transfer.loopback import LoopbackEngine, LoopbackNetwork
from kvcache.transfer.record import PoolRecord
from tests.engine.handoff.pair import DECODE, FRONT, Pair
from tests.identity import MODEL_ID
from tests.tiny import save_dsa

PAGE = 64
POOL = {"max_total_tokens": 16 * PAGE, "chunked_prefill_size": 100}
REQUEST = Request(rid="r", token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4))
RESERVATION = Reservation(
    session="127.0.0.1:1",
    pool=PoolRecord(page_size=PAGE, num_row_pages=2, buffers=()),
    model_id=MODEL_ID,
    first_position=0,
    dst_pages=[1],
)


class Written(NoTracer):
    """A tracer that keeps (stage, start, end, error)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float, str]] = []

    def write(
        self,
        name: str,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        self.spans.append((name, start_s, end_s, error))


class Timed:
    """A stopwatch whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.seen: list[tuple[str, float]] = []
        self.tracer = Written()
        self.watch = Stopwatch(
            lambda family, seconds: self.seen.append((family, seconds)),
            self.tracer,
            lambda: self.now,
        )

    def after(self, seconds: float) -> Stopwatch:
        self.now += seconds
        return self.watch


def submit(room: str = "", attempt: int = 0) -> Submit:
    route = Route(room=room, prefill_address="ipc://p") if room else None
    return Submit(REQUEST, attempt=attempt, route=route, traceparent="00-a-b-01")


def prefill(room: str = "room", attempt: int = 0) -> Prefill:
    return Prefill(
        room=room,
        frontend="front",
        request=REQUEST,
        output_ids=[],
        attempt=attempt,
        reservation=RESERVATION,
        traceparent="00-a-b-01",
    )


def out(reason: FinishReason | None = None, attempt: int = 0, error: str = "") -> TokenOut:
    return TokenOut(rid="r", index=0, ids=[7], finish_reason=reason, attempt=attempt, error=error)


def test_a_request_that_stays_here() -> None:
    timed = Timed()
    timed.watch.begin(submit())
    timed.after(1).started("r", 0)
    timed.after(2).started("r", 0)  # retracted and started again
    timed.after(4).told(out())
    timed.after(8).told(out())
    timed.after(16).told(out("length"))
    assert timed.seen == [(families.QUEUE, 1), (families.PREFILL, 6)]
    assert timed.tracer.spans == [
        ("queue", 100, 101, ""),
        ("prefill", 101, 107, ""),
        ("decode", 107, 131, ""),
    ]
    assert len(timed.watch) == 0


def test_a_request_prefilled_for_another_worker() -> None:
    timed = Timed()
    timed.watch.begin(prefill())
    timed.after(1).started("r", 0)
    timed.after(2).told(out())
    timed.after(4).sent(Handoff(room="room", token_id=7))
    assert timed.seen == [
        (families.QUEUE, 1),
        (families.HANDOFF_QUEUE, 1),
        (families.PREFILL, 2),
        (families.TAIL, 4),
    ]
    assert [name for name, *_ in timed.tracer.spans] == ["queue", "prefill", "handoff"]
    assert len(timed.watch) == 0


def test_a_request_decoded_after_another_worker_has_prefilled_it() -> None:
    timed = Timed()
    timed.watch.begin(submit("room"))
    timed.after(1).sent(prefill())
    timed.after(2).heard(Handoff(room="room", token_id=7))
    timed.after(4).told(out())
    timed.after(8).told(out("stop"))
    assert timed.seen == [(families.RESERVE_WAIT, 1), (families.WAIT, 2)]
    assert [name for name, *_ in timed.tracer.spans] == ["reserve", "receive", "decode"]
    assert len(timed.watch) == 0


def test_what_ends_in_mid_stage_counts_in_no_family() -> None:
    timed = Timed()
    timed.watch.begin(submit("a"))
    timed.after(1).sent(HandBack(rid="r", attempt=0, reason="the worker is shutting down"))
    timed.watch.begin(prefill("b"))
    timed.after(1).told(out("error", error="it broke"))
    timed.watch.begin(submit("c", attempt=1))
    timed.after(1).sent(CloseRoom("c"))
    timed.watch.begin(submit())
    timed.after(1).forget(lambda rid: False)
    assert timed.seen == []
    assert [error for *_, error in timed.tracer.spans] == [
        "the worker is shutting down",
        "it broke",
        "the request was given up",
        "the request was given up",
    ]
    assert len(timed.watch) == len(timed.watch._rooms) == 0


def test_messages_out_of_place_change_nothing() -> None:
    timed = Timed()
    timed.watch.begin(submit("room"))
    for message in (Handoff(room="room", token_id=1), Handoff(room="other", token_id=1)):
        timed.watch.heard(message)  # nothing is reserved yet
        timed.watch.sent(message)
    timed.watch.heard(RoomClosed(room="other"))
    timed.watch.sent(HandBack(rid="r", attempt=3, reason=""))
    timed.watch.started("other", 0)
    timed.watch.told(out("stop", attempt=2))
    timed.watch.forget(lambda rid: rid == "r")
    assert len(timed.watch) == 1
    timed.after(5).sent(prefill())
    assert timed.seen == [(families.RESERVE_WAIT, 5)]


EVENTS = st.sampled_from(
    [
        *(submit(room, attempt) for room in ("", "a", "b") for attempt in (0, 1)),
        *(prefill(room, attempt) for room in ("a", "b") for attempt in (0, 1)),
        *(out(reason, attempt) for reason in (None, "stop", "abort") for attempt in (0, 1)),
        *(Handoff(room=room, token_id=1) for room in ("a", "b")),
        *(RoomClosed(room=room) for room in ("a", "b")),
        CloseRoom("a"),
        HandBack(rid="r", attempt=0, reason="full"),
        "started",
        "heard",
    ]
)


@given(st.lists(EVENTS, max_size=40))
def test_nothing_is_left_whatever_comes(events: list[Any]) -> None:
    timed = Timed()
    for event in events:
        watch = timed.after(1)
        match event:
            case Submit():
                watch.begin(event)
            case Prefill():
                watch.sent(event)
                watch.begin(event)
            case TokenOut():
                watch.told(event)
            case "started":
                watch.started("r", 0)
            case "heard":
                watch.heard(Handoff(room="a", token_id=1))
            case _:
                watch.sent(event)
        assert len(watch) <= 2  # attempts of the one request
    assert all(seconds >= 0 for _, seconds in timed.seen)
    timed.watch.forget(lambda rid: False)
    assert len(timed.watch) == len(timed.watch._rooms) == 0


# -- in real workers


@pytest.fixture(scope="module")
def dsa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dsa(tmp_path_factory.mktemp("dsa"))


@pytest.fixture
def pair(dsa: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    network = LoopbackNetwork()
    monkeypatch.setattr("engine.loading.MooncakeEngine", lambda host, protocol: network.engine())
    pair = Pair(dsa, prefill=POOL, decode=POOL)
    yield pair
    pair.close()


def exposed(node: Any) -> dict[str, MetricFamily]:
    found = node.metrics.families(node.engine, num_malformed=0, refused={})
    # As in a heartbeat.
    assert Heartbeat(node.scheduler.load, found).metrics == found
    return {family.name: family for family in found}


def count(node: Any, family: str) -> float:
    (value,) = [s.value for s in exposed(node)[family].samples if s.name == f"{family}_count"]
    return value


def assert_no_leak(pair: Pair) -> None:
    for node in (pair.prefill, pair.decode):
        node.inbox.forget_owners()
        assert len(node.inbox._stopwatch) == len(node.inbox._stopwatch._rooms) == 0


def test_families_of_a_handed_over_request(pair: Pair) -> None:
    pair.submit("r", list(range(3, 180)))
    pair.run()
    for node, names in (
        (pair.prefill, (families.QUEUE, families.PREFILL, families.HANDOFF_QUEUE, families.TAIL)),
        (pair.decode, (families.RESERVE_WAIT, families.WAIT)),
    ):
        assert {name: count(node, name) for name in names} == dict.fromkeys(names, 1)
    sent = {
        name: [(s.labels, s.value) for s in exposed(pair.prefill)[name].samples]
        for name in ("plait_handoff_bytes_sent", "plait_handoff_write_failures")
    }
    record = pair.prefill.engine.record
    assert record is not None
    num_bytes = 3 * record.page_bytes  # of 177 tokens
    assert sent["plait_handoff_bytes_sent"] == [({"rank": "0"}, num_bytes)]
    assert sent["plait_handoff_write_failures"] == [({"rank": "0"}, 0)]
    assert_no_leak(pair)


def test_every_way_to_end_leaves_nothing(pair: Pair) -> None:
    long = [(7 * i) % 190 + 3 for i in range(300)]
    pair.submit("complete", long)
    pair.submit("one token", long[:70], max_tokens=1)
    pair.submit("refused", [10_000])
    pair.run()
    pair.submit("aborted at once", long[1:])
    pair.abort("aborted at once")
    pair.submit("aborted later", long[2:], max_tokens=100)
    pair.turn()
    pair.turn()
    pair.abort("aborted later")
    pair.run()
    pair.submit("replayed", long[3:])
    pair.turn()
    pair.submit("replayed", long[3:], attempt=1)
    pair.run()
    pair.submit("orphan", long[4:], max_tokens=100)
    pair.turn()
    # Another connection of the same front end: what it had asked for before is given up.
    for node in (pair.prefill, pair.decode):
        node.inbox.take("new connection", Register(kind="frontend", name="front"))
    pair.run()
    assert_no_leak(pair)
    pair.assert_all_given_back()


def test_a_failed_write_is_counted_at_its_rank(pair: Pair) -> None:
    engine = pair.prefill.engine.leader.transfer
    assert isinstance(engine, LoopbackEngine)
    engine.fail_next(10)
    pair.submit("r", list(range(3, 100)))
    pair.run()
    assert {handed.rid for handed in pair.hand_backs} == {"r"}
    (failures,) = exposed(pair.prefill)["plait_handoff_write_failures"].samples
    assert (failures.labels, failures.value) == ({"rank": "0"}, 1)
    assert count(pair.decode, families.WAIT) == count(pair.prefill, families.TAIL) == 0
    assert_no_leak(pair)


def test_a_lost_decode_worker_leaves_nothing(pair: Pair) -> None:
    pair.submit("r", list(range(3, 250)))
    pair.turn()
    pair.prefill.inbox.take(DECODE, Register(kind="worker", name="decode"))
    pair.prefill.inbox.take(FRONT, Abort("r"))
    pair.run()
    assert_no_leak(pair)
