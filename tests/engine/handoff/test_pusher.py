"""What ranks send of a room, and that each reports it once, however it ends."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.handoff.pusher import Pusher
from engine.handoff.room import Reservation, RoomReport
from kvcache.transfer.base import TransferEngine
from kvcache.transfer.loopback import LoopbackEngine, LoopbackNetwork
from kvcache.transfer.mooncake import MooncakeEngine
from kvcache.transfer.plan import register_pool
from tests.identity import MODEL_ID
from tests.kvcache.transfer.pools import GEOMETRIES, MLA, contents, random_pool

WAIT_S = 60.0
NUM_DECODE_PAGES = 30


class Decode:
    """A decode worker: its pool, and how it was before anything was sent."""

    def __init__(self, engine: TransferEngine, geometry: str = "latent+index") -> None:
        self.engine = engine
        self.pool = random_pool(GEOMETRIES[geometry], NUM_DECODE_PAGES, 2)
        register_pool(engine, self.pool.record())
        self.before = contents(self.pool)

    def reserve(self, dst_pages: list[int], first_position: int = 0) -> Reservation:
        return Reservation(
            session=self.engine.session,
            pool=self.pool.record(),
            model_id=MODEL_ID,
            first_position=first_position,
            dst_pages=dst_pages,
        )


class Rank:
    """A prefill rank with a pusher; logical pages 1 to 8 * size lie on the group."""

    def __init__(
        self, engine: TransferEngine, rank: int = 0, size: int = 1, geometry: str = "latent+index"
    ) -> None:
        self.engine = engine
        self.pool = random_pool(GEOMETRIES[geometry], 8, 1, size=size, rank=rank)
        register_pool(engine, self.pool.record())
        self.reports: queue.Queue[RoomReport] = queue.Queue()
        self.pusher = Pusher(self.pool, engine, rank, self.reports.put)

    def report(self) -> RoomReport:
        return self.reports.get(timeout=WAIT_S)

    def close(self) -> None:
        self.engine.close()
        self.pusher.close()


class Cell:
    """One rank, one decode worker, both of one process."""

    def __init__(self) -> None:
        network = LoopbackNetwork()
        self.engine: LoopbackEngine = network.engine()
        self.decode = Decode(network.engine())
        self.rank = Rank(self.engine)
        self.push = self.rank.pusher.push
        self.open = self.rank.pusher.open

    def see(self) -> None:
        """Wait until the pusher has seen all that it was told."""
        self.open("marker", self.decode.reserve([]))
        self.push("marker", [], [], True)
        assert self.rank.report().room == "marker"

    def arrived(self, pages: dict[int, int]) -> bool:
        """Whether exactly these pages, destination to source, are what the decode pool got."""
        ours = contents(self.rank.pool)
        want = list(self.decode.before)
        for there, here in pages.items():
            want[there] = ours[here]
        return contents(self.decode.pool) == want


@pytest.fixture
def cell() -> Iterator[Cell]:
    before = set(threading.enumerate())
    made = Cell()
    yield made
    made.rank.close()
    assert made.rank.reports.empty()  # no report that a test has not asked for
    assert set(threading.enumerate()) <= before


def group_of(size: int, geometry: str) -> tuple[list[Rank], Decode]:
    network = LoopbackNetwork()
    ranks = [Rank(network.engine(), rank, size, geometry) for rank in range(size)]
    return ranks, Decode(network.engine(), geometry)


def bytes_by_page(ranks: list[Rank], pages: list[int]) -> list[bytes]:
    """What each logical page holds, by the law of the layout."""
    held = [contents(rank.pool) for rank in ranks]
    size = len(ranks)
    return [held[(page - 1) % size][(page - 1) // size + 1] for page in pages]


def check_group(
    ranks: list[Rank],
    decode: Decode,
    pages: list[int],  # of a request, by position
    dst_pages: list[int],  # from first_position on
    first_position: int,
    ends: list[int],  # of the chunks, in request pages
) -> None:
    before = contents(decode.pool)
    for rank in ranks:
        rank.pusher.open("room", decode.reserve(dst_pages, first_position))
        for number, (start, end) in enumerate(itertools.pairwise([0, *ends]), 1):
            is_last = number == len(ends)
            rank.pusher.push("room", pages[start:end], list(range(start, end)), is_last)
    reports = [rank.report() for rank in ranks]
    assert [(report.room, report.status, report.error) for report in reports] == [
        ("room", "done", "")
    ] * len(ranks)
    assert sum(report.num_pages for report in reports) == len(dst_pages)
    page_bytes = decode.pool.record().page_bytes
    assert sum(report.num_bytes for report in reports) == len(dst_pages) * page_bytes
    for page, there in zip(bytes_by_page(ranks, pages[first_position:]), dst_pages, strict=True):
        before[there] = page
    assert contents(decode.pool) == before


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_ranks_of_a_group_send_every_wanted_page_once(data: st.DataObject) -> None:
    """Any pages, chunks, prefix that decode has, and number of senders."""
    size = data.draw(st.sampled_from([1, 2, 3, 4]))
    ranks, decode = group_of(size, data.draw(st.sampled_from(sorted(GEOMETRIES))))
    num_pages = data.draw(st.integers(1, 8 * size))
    pages = data.draw(st.permutations(range(1, 8 * size + 1)))[:num_pages]
    first = data.draw(st.integers(0, num_pages))
    num_wanted = min(num_pages - first, NUM_DECODE_PAGES)
    first = num_pages - num_wanted
    dst = data.draw(st.permutations(range(1, NUM_DECODE_PAGES + 1)))[:num_wanted]
    cuts = data.draw(st.lists(st.integers(0, num_pages), max_size=3))
    check_group(ranks, decode, pages, dst, first, [*sorted(cuts), num_pages])
    written = [
        span
        for rank in ranks
        for _, write in rank.engine.written  # type: ignore[attr-defined]
        for span in range(write.destination, write.destination + write.num_bytes)
    ]
    assert len(written) == len(set(written)) == num_wanted * decode.pool.record().page_bytes
    for rank in ranks:
        rank.close()


_KEPT: list[object] = []  # memory must outlive the engines


@pytest.fixture(scope="module")
def engines() -> Iterator[list[MooncakeEngine]]:
    made = [MooncakeEngine() for _ in range(5)]
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_group_over_the_real_engine(
    size: int, geometry: str, engines: list[MooncakeEngine]
) -> None:
    ranks = [Rank(engines[rank], rank, size, geometry) for rank in range(size)]
    decode = Decode(engines[4], geometry)
    _KEPT.extend([ranks, decode])
    pages = [5, 6, 7, 8, 1, 2, 4, 3]
    dst = [11, 12, 13, 30, 29, 1, 2]
    check_group(ranks, decode, pages, dst, 1, [0, 3, 4, 8])
    for rank in ranks:
        rank.pusher.close()


def test_a_rank_that_owns_nothing_reports() -> None:
    ranks, decode = group_of(4, "latent")
    check_group(ranks, decode, [2], [7], 0, [1])  # page 2 lies on rank 1
    ranks[0].pusher.open("cached", decode.reserve([], 3))
    ranks[0].pusher.push("cached", [1, 2, 3], [0, 1, 2], True)
    report = ranks[0].report()
    assert (report.status, report.num_pages, report.num_bytes, report.seconds) == ("done", 0, 0, 0)
    assert (report.rank, report.room) == (0, "cached")
    for rank in ranks:
        rank.close()


def test_a_chunk_is_not_the_end(cell: Cell) -> None:
    cell.open("a", cell.decode.reserve([4, 5]))
    stall = cell.engine.stall_next(2)
    cell.push("a", [1], [0], False)
    cell.push("a", [2], [1], True)
    assert stall.reached.wait(WAIT_S)
    assert cell.rank.reports.empty()
    stall.release()
    report = cell.rank.report()
    assert (report.status, report.num_pages) == ("done", 2)
    assert report.seconds > 0
    assert cell.arrived({4: 1, 5: 2})


def test_rooms_of_other_workers_do_not_wait(cell: Cell) -> None:
    network = cell.engine._network
    other = Decode(network.engine())
    stall = cell.engine.stall_next()
    cell.open("a", cell.decode.reserve([4]))
    cell.push("a", [1], [0], True)
    assert stall.reached.wait(WAIT_S)
    cell.open("b", other.reserve([4]))
    cell.push("b", [1], [0], True)
    assert cell.rank.report().room == "b"
    stall.release()
    assert cell.rank.report().room == "a"


def test_a_failed_write_is_tried_again(cell: Cell) -> None:
    cell.engine.fail_next(1)
    cell.open("a", cell.decode.reserve([4, 6]))
    cell.push("a", [1, 2], [0, 1], True)
    report = cell.rank.report()
    assert (report.status, report.error, report.num_pages) == ("done", "", 2)
    assert cell.arrived({4: 1, 6: 2})


def test_a_second_failure_ends_the_room_alone(cell: Cell) -> None:
    cell.engine.fail_next(2)
    cell.open("a", cell.decode.reserve([4, 6, 7]))
    cell.push("a", [1], [0], False)
    report = cell.rank.report()
    assert (report.status, report.num_pages) == ("failed", 0)
    assert "told to fail" in report.error
    cell.push("a", [2, 3], [1, 2], True)  # the leader does not know yet
    cell.rank.pusher.close_room("a")
    cell.open("b", cell.decode.reserve([9]))
    cell.push("b", [8], [0], True)
    assert (cell.rank.report().status, cell.rank.reports.empty()) == ("done", True)
    assert cell.arrived({9: 8})


def test_what_is_queued_when_a_room_fails_is_dropped(cell: Cell) -> None:
    stall = cell.engine.stall_next()
    cell.open("a", cell.decode.reserve([4, 5]))
    cell.push("a", [1], [0], False)
    assert stall.reached.wait(WAIT_S)
    cell.push("a", [2], [1], False)
    cell.push("a", [3], [2], True)  # not reserved
    cell.see()
    stall.release()
    report = cell.rank.report()
    assert (report.status, report.num_pages) == ("failed", 1)
    assert cell.arrived({4: 1})


def test_closing_waits_for_what_is_in_flight(cell: Cell) -> None:
    stall = cell.engine.stall_next()
    cell.open("a", cell.decode.reserve([4, 5]))
    cell.push("a", [1], [0], False)
    cell.push("a", [2], [1], True)
    assert stall.reached.wait(WAIT_S)
    cell.rank.pusher.close_room("a")
    cell.see()
    stall.release()
    report = cell.rank.report()
    assert (report.room, report.status, report.num_pages) == ("a", "closed", 1)
    assert cell.arrived({4: 1})  # the chunk behind it was dropped


def test_closing_an_idle_room_and_one_that_is_none(cell: Cell) -> None:
    cell.rank.pusher.close_room("unknown")
    cell.push("unknown", [1], [0], True)
    cell.open("a", cell.decode.reserve([4]))
    cell.rank.pusher.close_room("a")
    cell.rank.pusher.close_room("a")
    report = cell.rank.report()
    assert (report.room, report.status, report.error) == ("a", "closed", "")
    cell.push("a", [1], [0], True)
    cell.open("a", cell.decode.reserve([4]))  # the room may be opened anew
    cell.push("a", [1], [0], True)
    assert cell.rank.report().status == "done"
    assert cell.arrived({4: 1})


def test_a_failure_while_closing_is_told(cell: Cell) -> None:
    """The bytes of a failed write may come late: that room is not simply closed."""
    stall = cell.engine.stall_next()
    cell.engine.fail_next(1)
    cell.open("a", cell.decode.reserve([4]))
    cell.push("a", [1], [0], False)
    assert stall.reached.wait(WAIT_S)
    cell.rank.pusher.close_room("a")
    cell.see()
    stall.release()
    assert cell.rank.report().status == "failed"


def test_a_peer_that_is_given_up(cell: Cell) -> None:
    stall = cell.engine.stall_next(2)
    cell.open("a", cell.decode.reserve([4]))
    cell.push("a", [1], [0], True)
    assert stall.reached.wait(WAIT_S)
    cell.rank.pusher.close_room("a")
    cell.see()
    cell.engine.forget(cell.decode.engine.session)
    report = cell.rank.report()
    assert (report.room, report.status) == ("a", "failed")
    assert cell.arrived({})


@pytest.mark.parametrize(
    ("dst", "positions", "message"),
    [
        ([4], [7], "page position 7 is outside the reservation, which is for positions 5 to 5"),
        ([31], [5], "their row page 31 is outside the pool; accepted: 1 to 30"),
        ([0], [5], "their row page 0 is outside the pool"),
    ],
)
def test_a_reservation_that_cannot_be_met(
    cell: Cell, dst: list[int], positions: list[int], message: str
) -> None:
    cell.open("a", cell.decode.reserve(dst, 5))
    cell.push("a", [1], positions, True)
    report = cell.rank.report()
    assert report.status == "failed"
    assert message in report.error
    assert cell.arrived({})


def test_a_pool_that_does_not_fit(cell: Cell) -> None:
    theirs = random_pool(MLA, 4, 5).record()
    reservation = msgspec.structs.replace(cell.decode.reserve([1]), pool=theirs)
    cell.open("a", reservation)
    cell.push("a", [1], [0], True)
    report = cell.rank.report()
    assert report.status == "failed"
    assert "the pools differ: here [page_size 4" in report.error
    assert theirs.geometry() in report.error


def test_a_room_that_is_open_already(cell: Cell, caplog: pytest.LogCaptureFixture) -> None:
    cell.open("a", cell.decode.reserve([4]))
    cell.open("a", cell.decode.reserve([5]))
    cell.push("a", [1], [0], True)
    assert cell.rank.report().status == "done"
    assert cell.arrived({4: 1})
    assert "room a on rank 0 is open already" in caplog.text


def test_a_chunk_after_the_last(cell: Cell) -> None:
    cell.open("a", cell.decode.reserve([4, 5]))
    stall = cell.engine.stall_next()
    cell.push("a", [1], [0], True)
    cell.push("a", [2], [1], False)
    stall.release()
    report = cell.rank.report()
    assert report.status == "failed"
    assert "a chunk of room a came after its last" in report.error


def test_a_report_that_fails_does_not_stop_the_others(
    cell: Cell, caplog: pytest.LogCaptureFixture
) -> None:
    reports: queue.Queue[RoomReport] = queue.Queue()

    def report(found: RoomReport) -> None:
        if found.room == "a":
            raise RuntimeError("the leader is away")
        reports.put(found)

    pusher = Pusher(cell.rank.pool, cell.engine, 0, report)
    for room in ("a", "b"):
        pusher.open(room, cell.decode.reserve([]))
        pusher.push(room, [], [], True)
    assert reports.get(timeout=WAIT_S).room == "b"
    assert "room a on rank 0 could not be reported" in caplog.text
    pusher.close()


def test_close_reports_what_was_open() -> None:
    cell = Cell()
    stall = cell.engine.stall_next()
    cell.open("a", cell.decode.reserve([4]))
    cell.push("a", [1], [0], False)
    assert stall.reached.wait(WAIT_S)
    cell.open("b", cell.decode.reserve([5]))
    cell.engine.close()
    cell.rank.pusher.close()
    cell.rank.pusher.close()
    reports = {found.room: found.status for found in (cell.rank.report(), cell.rank.report())}
    assert reports == {"a": "failed", "b": "closed"}
    assert cell.rank.reports.empty()


def test_the_values_travel() -> None:
    reservation = Decode(LoopbackNetwork().engine()).reserve([3, 4], 2)
    wire = msgspec.msgpack.encode(reservation)
    assert msgspec.msgpack.decode(wire, type=Reservation) == reservation


def test_a_process_that_was_held_up_gives_up_the_rooms_it_had() -> None:
    """Their pages may be others' by now; rooms opened since are served."""
    now = [1000.0]
    network = LoopbackNetwork()
    decode, engine = Decode(network.engine()), network.engine()
    pool = random_pool(MLA, 8, 1)
    decode.pool = random_pool(MLA, NUM_DECODE_PAGES, 2)
    register_pool(decode.engine, decode.pool.record())
    register_pool(engine, pool.record())
    reports: queue.Queue[RoomReport] = queue.Queue()
    pusher = Pusher(pool, engine, 0, reports.put, clock_s=lambda: now[0])
    pusher.open("short", decode.reserve([3]))
    pusher.open("long", decode.reserve([4, 5]))
    now[0] += 9.0
    pusher.push("short", [1], [0], True)
    assert reports.get(timeout=WAIT_S).status == "done"
    pusher.push("long", [2], [0], False)
    while not engine.written[1:]:
        pass
    now[0] += 60.0
    pusher.push("long", [3], [1], True)
    report = reports.get(timeout=WAIT_S)
    assert (report.room, report.status) == ("long", "failed")
    assert "was held up" in report.error
    num_written = len(engine.written)
    pusher.open("after", decode.reserve([6]))
    pusher.push("after", [4], [0], True)
    assert reports.get(timeout=WAIT_S).status == "done"
    assert len(engine.written) > num_written
    engine.close()
    pusher.close()
    decode.engine.close()
