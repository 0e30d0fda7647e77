"""Requests over prefill and decode workers: where each part goes, and what a loss costs nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine.messages import Submit
from engine.types import Load, Role, TokenOut
from server.dispatch.client import EngineClient
from server.generation import Limits
from tests.server.scripted import Script, Server, reply, serving
from tests.server.stream import SPOKEN, TEXT, TOKENIZER, Stream, stalling
from tests.server.worker import ScriptedWorker

SPEAKING = reply(SPOKEN)


def pair(
    server: Server, prefill: Script = SPEAKING, decode: Script = SPEAKING
) -> tuple[ScriptedWorker, ScriptedWorker]:
    return (
        server.add_worker(prefill, role="prefill"),
        server.add_worker(decode, role="decode"),
    )


def once_more(script: Script) -> Script:
    """`script` for the first that it is asked; after that SPEAKING."""
    asked = threading.Event()

    def first_or_not(submit: Submit) -> Iterator[TokenOut | None]:
        if asked.is_set():
            return SPEAKING(submit)
        asked.set()
        return script(submit)

    return first_or_not


def num_tokens_known(server: Server) -> list[int]:
    """How many the front end has of each unfinished request."""
    return [len(answer.token_ids) for answer in server.client.requests.answers.values()]


def assert_nothing_left(server: Server) -> None:
    server.until(lambda: len(server.client.requests) == 0)
    for worker in server.client.fleet:
        assert (worker.num_live, worker.live_tokens) == (0, 0)


def test_the_decode_worker_is_told_which_group_prefills() -> None:
    with serving() as server:
        prefill, decode = pair(server)
        assert Stream(server, seed=1).answer() == (TEXT, ["stop"])
        submit = decode.submits.get(timeout=60)
        assert submit.route is not None
        assert submit.route.prefill_address == prefill.address
        assert len(submit.route.room) == 32 and int(submit.route.room, 16) >= 0
        asked = prefill.prefills.get(timeout=60)
        assert (asked.room, asked.request) == (submit.route.room, submit.request)
        assert prefill.submits.empty()
        assert (submit.attempt, submit.output_ids) == (0, [])
        assert_nothing_left(server)


def test_the_first_token_comes_from_prefill_and_the_rest_from_decode() -> None:
    other = TOKENIZER.encode("Z")[:1]
    with serving() as server:
        pair(server, prefill=reply(other), decode=SPEAKING)
        text, reasons = Stream(server).answer()
        assert (text, reasons) == ("Z" + TOKENIZER.decode(SPOKEN[1:-1]), ["stop"])


def test_the_first_token_does_not_wait_for_the_hand_over() -> None:
    with serving() as server:
        _, decode = pair(server, decode=stalling(0)[0])
        stream = Stream(server)
        server.until(lambda: num_tokens_known(server) == [1])
        server.add_worker(SPEAKING, role="decode")
        decode.vanish()
        assert stream.answer() == (TEXT, ["stop"])


def test_each_room_is_new() -> None:
    with serving() as server:
        _, decode = pair(server)
        for _ in range(5):
            Stream(server).answer()
        routes = [decode.submits.get(timeout=60).route for _ in range(5)]
        assert len({route.room for route in routes if route is not None}) == 5


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_completion_tokens": 1}])
def test_a_request_for_one_token_needs_no_decode_worker(fields: dict[str, int]) -> None:
    with serving() as server:
        prefill, decode = pair(server)
        _, reasons = Stream(server, **fields).answer()
        assert reasons == ["length"]
        assert prefill.submits.get(timeout=60).route is None
        assert decode.submits.empty()
        assert_nothing_left(server)


def test_a_pair_is_preferred_and_a_colocated_worker_is_there_for_the_rest() -> None:
    with serving() as server:
        both = server.add_worker(SPEAKING)
        prefill, decode = pair(server)
        assert Stream(server).answer() == (TEXT, ["stop"])
        assert decode.submits.qsize() == 1 and both.submits.empty()
        prefill.vanish()
        server.until(lambda: len(server.client.fleet) == 2)
        assert Stream(server).answer() == (TEXT, ["stop"])
        assert both.submits.get(timeout=60).route is None


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_requests_are_parked_until_both_halves_are_there(first: str) -> None:
    with serving() as server:
        assert server.http.get("/ready").status_code == 503
        for role in ("colocated", first):  # the first one says what the fleet can do, and goes
            worker = server.add_worker(SPEAKING, role=role)
            if role == "colocated":
                worker.vanish()
                server.until(lambda: len(server.client.fleet) == 0)
        assert server.http.get("/ready").status_code == 503
        stream = Stream(server)
        server.until(lambda: server.client.metrics.num_parked == 1)
        server.add_worker(SPEAKING, role="decode" if first == "prefill" else "prefill")
        assert stream.answer() == (TEXT, ["stop"])
        assert server.http.get("/ready").status_code == 200
        assert server.client.metrics.num_parked == 0


def test_a_hand_back_replays_the_next_attempt_and_aborts_the_old_one_at_both() -> None:
    with serving() as server:
        script, reached = stalling(2)
        prefill, decode = pair(server, decode=once_more(script))
        stream = Stream(server)
        assert reached.wait(60)
        first = decode.submits.get(timeout=60)
        server.until(lambda: num_tokens_known(server) == [3])
        decode.hand_back(first, "the pool is gone")
        assert stream.answer() == (TEXT, ["stop"])
        second = decode.submits.get(timeout=60)
        assert (second.attempt, second.output_ids) == (1, SPOKEN[:3])
        assert second.request == first.request
        assert second.route is not None and first.route is not None
        assert second.route.room != first.route.room
        assert decode.aborts.get(timeout=60).attempt == 0
        assert prefill.aborts.empty()  # its part was done
        assert 'plait_replays_total{reason="handed_back"} 1.0' in server.http.get("/metrics").text
        assert_nothing_left(server)


def test_a_hand_back_before_the_first_token_aborts_at_the_prefill_group_too() -> None:
    with serving() as server:
        script, reached = stalling(0)
        prefill, decode = pair(server, prefill=once_more(script))
        stream = Stream(server)
        assert reached.wait(60)
        decode.hand_back(decode.submits.get(timeout=60), "a transfer failed")
        assert stream.answer() == (TEXT, ["stop"])
        for worker in (prefill, decode):
            assert worker.aborts.get(timeout=60).attempt == 0
        assert decode.submits.get(timeout=60).attempt == 1


def test_what_an_old_attempt_says_is_dropped() -> None:
    with serving() as server:
        script, reached = stalling(2)
        _, decode = pair(server, decode=once_more(script))
        release = threading.Event()
        decode.script = held_until(release, decode.script)
        stream = Stream(server)
        assert reached.wait(60)
        first = decode.submits.get(timeout=60)
        server.until(lambda: num_tokens_known(server) == [3])
        decode.hand_back(first, "lost")
        second = decode.submits.get(timeout=60)
        late = TokenOut(
            rid=first.request.rid, index=3, ids=SPOKEN[:1], finish_reason="stop", attempt=0
        )
        decode.say_outputs([late, late])
        decode.hand_back(first, "lost, it says again")  # of an attempt that is over
        release.set()
        assert stream.answer() == (TEXT, ["stop"])
        assert (second.attempt, decode.submits.qsize()) == (1, 0)


@pytest.mark.parametrize("role", ["colocated", "prefill"])
def test_what_an_old_attempt_said_before_is_not_taken_for_the_next_ones(role: Role) -> None:
    """The token is there, and the event loop learns of it when the next attempt has begun."""
    with serving() as server:
        gate = threading.Event()
        lost = server.add_worker(one_when_open(gate), role=role)
        if role == "prefill":
            server.add_worker(SPEAKING, role="decode")
        stream = Stream(server)
        server.until(lambda: num_tokens_known(server) == [0] and len(list(server.client.fleet)) > 0)
        script, _ = stalling(0)
        heir = server.add_worker(script, role=role)

        def lose() -> None:
            gate.set()
            while num_tokens_known(server) == [0]:
                time.sleep(0)
            server.client.roster.remove(lost.address)

        server.call(lose)
        (heir.submits if role == "colocated" else heir.prefills).get(timeout=60)
        server.call(lambda: None)
        worker = server.client.fleet.at(heir.address)
        assert worker is not None
        assert worker.num_live == 1 and worker.live_tokens > 0
        server.add_worker(SPEAKING, role=role)
        heir.leave()
        assert stream.answer() == (TEXT, ["stop"])
        assert_nothing_left(server)


def one_when_open(gate: threading.Event) -> Script:
    """Says a single token, when the gate is open."""

    def script(submit: Submit) -> Iterator[TokenOut | None]:
        while not gate.is_set():
            yield None
        yield next(SPEAKING(submit))
        while True:
            yield None

    return script


def test_a_first_token_that_is_known_already_leaves_no_load_behind() -> None:
    """An attempt before has said it, after this one was given what was known."""
    with serving() as server:
        gate = threading.Event()
        _, decode = pair(server, prefill=held_until_open(gate, 0))
        stream = Stream(server)
        rid = decode.submits.get(timeout=60).request.rid
        answer = server.client.requests.answers[rid]
        answer.fold(TokenOut(rid=rid, index=0, ids=SPOKEN[:1]))
        gate.set()
        stream.join()
        assert_nothing_left(server)


def held_until(release: threading.Event, script: Script) -> Script:
    """The first time as it is; later attempts say nothing before `release`."""

    def held(submit: Submit) -> Iterator[TokenOut | None]:
        inner = script(submit)
        while submit.attempt and not release.is_set():
            yield None
        yield from inner

    return held


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_lost_decode_worker_is_invisible(num_tokens: int) -> None:
    """`num_tokens`: what it has said; the first one comes from prefill."""
    with serving() as server:
        script, reached = stalling(num_tokens)
        _, decode = pair(server, decode=script)
        stream = Stream(server, seed=3)
        assert reached.wait(60)
        server.until(lambda: num_tokens_known(server) == [1 + num_tokens])
        heir = server.add_worker(SPEAKING, role="decode")
        decode.vanish()
        assert stream.answer() == (TEXT, ["stop"])
        replayed = heir.submits.get(timeout=60)
        assert (replayed.attempt, replayed.output_ids) == (1, SPOKEN[: 1 + num_tokens])
        assert replayed.request == decode.submits.get(timeout=60).request
        assert_nothing_left(server)


@pytest.mark.parametrize("loss", [ScriptedWorker.vanish, ScriptedWorker.leave])
def test_a_prefill_group_lost_before_the_first_token_is_invisible(
    loss: Callable[[ScriptedWorker], None],
) -> None:
    with serving() as server:
        script, reached = stalling(0)
        prefill, decode = pair(server, prefill=script)
        stream = Stream(server, seed=3)
        assert reached.wait(60)
        heir = server.add_worker(SPEAKING, role="prefill")
        loss(prefill)
        assert stream.answer() == (TEXT, ["stop"])
        routes = [decode.submits.get(timeout=60).route for _ in range(2)]
        assert [route.prefill_address for route in routes if route is not None] == [
            prefill.address,
            heir.address,
        ]
        assert decode.aborts.get(timeout=60).attempt == 0
        assert_nothing_left(server)


def test_a_prefill_group_lost_after_its_part_is_not_missed() -> None:
    with serving() as server:
        gate = threading.Event()
        prefill, decode = pair(server, decode=held_until_open(gate, 3))
        stream = Stream(server)
        server.until(lambda: num_tokens_known(server) == [4])
        prefill.vanish()
        server.until(lambda: len(server.client.fleet) == 1)
        gate.set()
        assert stream.answer() == (TEXT, ["stop"])
        assert decode.submits.qsize() == 1
        assert 'plait_replays_total{reason="lost"} 0.0' in server.http.get("/metrics").text


def test_a_prefill_group_that_says_goodbye_after_its_part_is_not_missed() -> None:
    """What it has handed over the decode worker has, or will hand back, also where it has said
    nothing yet."""
    with serving() as server:
        gate = threading.Event()
        prefill, decode = pair(server, decode=held_until_open(gate, 0))
        stream = Stream(server)
        server.until(lambda: num_tokens_known(server) == [1])
        decode.submits.get(timeout=60)
        prefill.leave()
        server.until(lambda: len(server.client.fleet) == 1)
        gate.set()
        assert stream.answer() == (TEXT, ["stop"])
        assert decode.submits.empty()
        assert_nothing_left(server)
        assert 'plait_replays_total{reason="lost"} 0.0' in server.http.get("/metrics").text


@pytest.mark.parametrize("loss", ["killed", "handed back after the goodbye"])
def test_a_prefill_group_whose_part_did_not_arrive_is_invisible(loss: str) -> None:
    """It has said its token; the decode worker has said nothing."""
    with serving() as server:
        script, reached = stalling(0)
        prefill, decode = pair(server, decode=once_more(script))
        stream = Stream(server, seed=3)
        assert reached.wait(60)
        server.until(lambda: num_tokens_known(server) == [1])
        heir = server.add_worker(SPEAKING, role="prefill")
        submit = decode.submits.get(timeout=60)
        if loss == "killed":
            prefill.vanish()
        else:
            prefill.leave()
            server.until(lambda: len(server.client.fleet) == 2)
            decode.hand_back(submit, "the KV did not arrive")
        assert stream.answer() == (TEXT, ["stop"])
        replayed = heir.prefills.get(timeout=60)
        assert (replayed.attempt, replayed.output_ids) == (1, SPOKEN[:1])
        assert_nothing_left(server)


def held_until_open(gate: threading.Event, num_tokens: int) -> Script:
    """Says `num_tokens`, and the rest when the gate is open."""

    def script(submit: Submit) -> Iterator[TokenOut | None]:
        for number, out in enumerate(SPEAKING(submit)):
            while number >= num_tokens and not gate.is_set():
                yield None
            yield out

    return script


def test_replays_are_bounded_only_without_progress() -> None:
    """Each decode worker says one token more and goes, more often than replays are allowed."""
    with serving(Limits(max_replays=1)) as server:
        server.add_worker(SPEAKING, role="prefill")
        stream: Stream | None = None
        for number in range(4):
            script, _ = stalling(1)
            worker = server.add_worker(script, role="decode")
            stream = stream or Stream(server)
            num_known = 2 * number + 2  # one of prefill and one of decode in each attempt
            server.until(lambda n=num_known: num_tokens_known(server) == [n])
            worker.vanish()
            server.until(lambda: len(server.client.fleet) == 1)
        server.add_worker(SPEAKING, role="decode")
        assert stream is not None
        assert stream.answer() == (TEXT, ["stop"])


def test_hand_backs_without_a_token_end_in_an_error() -> None:
    with serving(Limits(max_replays=2)) as server:
        _, decode = pair(server, prefill=stalling(0)[0])
        stream = Stream(server)
        for attempt in range(3):
            submit = decode.submits.get(timeout=60)
            assert submit.attempt == attempt
            decode.hand_back(submit, "it cannot be")
        stream.join()
        assert stream.status == 503
        assert "the request was lost 3 times, at last as it cannot be" in stream.lines[0]
        assert_nothing_left(server)


def test_an_overloaded_worker_is_passed_over() -> None:
    with serving() as server:
        full = server.add_worker(stalling(0)[0])
        stream = Stream(server)
        submit = full.submits.get(timeout=60)
        other = server.add_worker(SPEAKING)
        full.hand_back(submit, "the queue is full", is_overloaded=True)
        assert stream.answer() == (TEXT, ["stop"])
        for _ in range(3):
            assert Stream(server).answer() == (TEXT, ["stop"])
        assert (other.submits.qsize(), full.submits.qsize()) == (4, 0)


def test_a_draining_worker_gets_nothing_new() -> None:
    with serving() as server:
        leaving, staying = (server.add_worker(SPEAKING) for _ in range(2))
        leaving.beat(Load(free_pages=1024, is_draining=True))
        server.until(lambda: any(worker.load.is_draining for worker in server.client.fleet))
        for _ in range(4):
            assert Stream(server).answer() == (TEXT, ["stop"])
        assert (staying.submits.qsize(), leaving.submits.qsize()) == (4, 0)


def test_a_worker_that_restarts_at_its_address_is_another() -> None:
    with serving() as server:
        script, reached = stalling(3)
        first = server.add_worker(script)
        stream = Stream(server)
        assert reached.wait(60)
        first.vanish()
        second = server.add_worker(SPEAKING, address=first.address)
        assert stream.answer() == (TEXT, ["stop"])
        assert second.submits.get(timeout=60).attempt == 1
        assert len(server.client.fleet) == 1


def test_a_removed_worker_gets_nothing_and_its_requests_go_on() -> None:
    with serving() as server:
        script, reached = stalling(2)
        removed = server.add_worker(script)
        stream = Stream(server)
        assert reached.wait(60)
        server.add_worker(SPEAKING)
        server.call(lambda: server.client.roster.remove(removed.address))
        assert stream.answer() == (TEXT, ["stop"])
        assert len(server.client.fleet) == 1


async def test_a_restarted_front_end_finds_all_workers() -> None:
    with serving() as server:
        workers = [*pair(server), server.add_worker(SPEAKING)]
        workers[0].load = Load(num_rooms=7, free_pages=5)
        again = EngineClient(TOKENIZER.token_bytes)
        again.start()
        for worker in workers:
            again.roster.add(worker.address)
        await again.can_serve()
        known = again.fleet
        while len(known) < 3 or known.at(workers[0].address).load.num_rooms != 7:
            await asyncio.sleep(0.002)
        assert {worker.hello for worker in known} == {worker.hello for worker in workers}
        assert again.is_ready
        await again.close()
        # The first one is not disturbed by the other's end.
        assert await asyncio.to_thread(Stream(server).answer) == (TEXT, ["stop"])
