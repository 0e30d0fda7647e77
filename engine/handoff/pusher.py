"""A rank's sending side of the hand-off: the pages it owns, written into decode workers' pools.

Owns what is queued and in flight for each room, and reports each room once. Knows no scheduler:
which pages travel, and when, it is told.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import torch

from engine.handoff.room import Reservation, RoomReport
from kvcache.pool import KVPool, Pages
from kvcache.transfer.base import TransferEngine, Writes
from kvcache.transfer.plan import plan_writes

log = logging.getLogger("plait.pusher")

_NUM_TRIES = 2
# A process that was held up for longer than this (stopped, suspended) does not know what has become
# of its rooms: it gives them up. Well below LATE_BYTES_S, after which their pages may be others'.
_MAX_PAUSE_S = 10.0
_PULSE_S = 0.5

Task: TypeAlias = Callable[["_Room"], None]


@dataclass(slots=True)
class _Room:
    """Owned by the pusher's thread."""

    name: str
    reservation: Reservation
    in_flight: set[Future[None]] = field(default_factory=set)
    has_last: bool = False
    is_closing: bool = False
    error: str = ""
    num_pages: int = 0
    num_bytes: int = 0
    num_pauses: int = 0  # that the process had been through when the room was opened
    seconds: float = 0.0
    busy_since: float = 0.0

    @property
    def is_ending(self) -> bool:
        return self.is_closing or bool(self.error)

    def status(self) -> Literal["done", "failed", "closed"] | None:
        """How the room ended; None while it has not."""
        if self.in_flight:
            return None
        if self.error:
            return "failed"
        if self.is_closing:
            return "closed"
        return "done" if self.has_last else None


class Pulse:
    """Notices that this process was held up: a thread looks at the clock, and so does who asks.
    `clock_s` goes on while a process, or its machine, is stopped."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._last_s = clock_s()
        self._num_pauses = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def num_pauses(self) -> int:
        """How often the process was held up for more than _MAX_PAUSE_S until now."""
        with self._lock:
            now = self._clock_s()
            self._num_pauses += now - self._last_s > _MAX_PAUSE_S
            self._last_s = now
            return self._num_pauses

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_PULSE_S):
            self.num_pauses()


def _boot_clock_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Pusher:
    """Verbs in order: open a room, push its chunks, close it where it is to end early.

    No verb waits: they are carried out in order by the pusher's thread, bytes move on the engine's.
    `report` is called from the pusher's thread, exactly once for each room that was opened: when
    the last chunk's bytes are in the peer's memory, or when the room failed or was closed and no
    write of it runs any more. The bytes of a write that failed may still arrive later, see
    kvcache.transfer.base.LATE_BYTES_S.
    """

    def __init__(
        self,
        pool: KVPool,
        engine: TransferEngine,  # with the pool registered
        rank: int,
        report: Callable[[RoomReport], None],
        clock_s: Callable[[], float] = _boot_clock_s,
    ) -> None:
        self._pool = pool
        self._record = pool.record()
        self._engine = engine
        self._rank = rank
        self._report = report
        self._rooms: dict[str, _Room] = {}
        self._tasks: queue.SimpleQueue[tuple[str, Task | Reservation] | None] = queue.SimpleQueue()
        self._is_closing = False
        self._pulse = Pulse(clock_s)
        self._thread = threading.Thread(target=self._run, name="pusher", daemon=True)
        self._thread.start()

    def open(self, room: str, reservation: Reservation) -> None:
        """Begin a room. Nothing where it is open already. A pool that does not fit is found out at
        the first chunk and fails the room."""
        self._tasks.put((room, reservation))

    def push(
        self, room: str, pages: Sequence[int], positions: Sequence[int], is_last: bool
    ) -> None:
        """Send the pages that this rank owns; all that was launched on the device before this call
        is waited for. A room that is unknown, or has ended, is ignored.

        `pages` are logical, `positions` their places in the request, both [num_pages].
        """
        written = self._record_event()
        self._tasks.put((room, partial(self._send, written, list(pages), list(positions), is_last)))

    def close_room(self, room: str) -> None:
        """Drop what is queued for a room and report it once nothing of it is in flight."""
        self._tasks.put((room, self._close))

    def close(self) -> None:
        """Close all rooms and end the thread when nothing is in flight. Where peers may hang, close
        the engine first, which fails what is in flight. A second call does nothing."""
        self._tasks.put(None)
        self._thread.join()
        self._pulse.close()

    def _record_event(self) -> torch.Event | None:
        device = self._pool.device
        if device.type == "cpu":
            return None
        event = torch.Event(device)
        event.record(torch.cuda.current_stream(device))
        return event

    def _run(self) -> None:
        while self._rooms or not self._is_closing:
            item = self._tasks.get()
            if item is None:
                self._is_closing = True
                for room in list(self._rooms.values()):
                    self._step(room, self._close)
                continue
            name, task = item
            if isinstance(task, Reservation):
                self._begin(name, task)
            elif name in self._rooms:
                self._step(self._rooms[name], task)

    def _begin(self, name: str, reservation: Reservation) -> None:
        if name in self._rooms:
            log.error("room %s on rank %d is open already", name, self._rank)
            return
        room = self._rooms[name] = _Room(name, reservation, num_pauses=self._pulse.num_pauses())
        if self._is_closing:
            self._step(room, self._close)

    def _step(self, room: _Room, task: Task) -> None:
        """Run a task of a room; what it raises is the room's failure and nobody else's."""
        try:
            task(room)
        except Exception as error:
            if not isinstance(error, ValueError):
                log.exception("room %s on rank %d", room.name, self._rank)
            self._fail(f"{type(error).__name__}: {error}", room)
        if room.status() is not None:
            del self._rooms[room.name]
            self._tell(room)

    def _tell(self, room: _Room) -> None:
        report = RoomReport(
            rank=self._rank,
            room=room.name,
            status=room.status() or "failed",
            error=room.error,
            num_pages=room.num_pages,
            num_bytes=room.num_bytes,
            seconds=room.seconds,
        )
        try:
            self._report(report)
        except Exception:
            log.exception("room %s on rank %d could not be reported", room.name, self._rank)

    def _send(
        self,
        written: torch.Event | None,
        pages: list[int],
        positions: list[int],
        is_last: bool,
        room: _Room,
    ) -> None:
        if room.is_ending:
            return
        if room.has_last:
            raise ValueError(f"a chunk of room {room.name} came after its last")
        room.has_last = is_last
        ours, theirs = self._destination(room.reservation, pages, positions)
        if not len(ours):
            return
        writes = plan_writes(self._record, room.reservation.pool, ours, theirs)
        if written is not None:
            written.synchronize()
        self._start(writes, len(ours), 1, room)

    def _destination(
        self, reservation: Reservation, pages: list[int], positions: list[int]
    ) -> tuple[Pages, Pages]:
        """(our row pages, theirs) of the pages that this rank owns and the decode worker wants."""
        ours, where = self._pool.owned_pages(
            np.array(pages, dtype=np.int64), np.array(positions, dtype=np.int64)
        )
        wanted = where >= reservation.first_position
        ours, where = ours[wanted], where[wanted] - reservation.first_position
        outside = where[where >= len(reservation.dst_pages)]
        if outside.size:
            first = reservation.first_position
            raise ValueError(
                f"page position {first + int(outside[0])} is outside the reservation, which is "
                f"for positions {first} to {first + len(reservation.dst_pages) - 1}"
            )
        return ours, np.array(reservation.dst_pages, dtype=np.int64)[where]

    def _start(self, writes: Writes, num_pages: int, num_tries: int, room: _Room) -> None:
        if self._pulse.num_pauses() != room.num_pauses:
            self._fail(f"rank {self._rank} was held up for more than {_MAX_PAUSE_S:g} s", room)
            return
        if not room.in_flight:
            room.busy_since = time.monotonic()
        future = self._engine.write(room.reservation.session, writes)
        room.in_flight.add(future)
        ended = partial(self._ended, writes, num_pages, num_tries, future)
        future.add_done_callback(lambda _: self._tasks.put((room.name, ended)))

    def _ended(
        self,
        writes: Writes,
        num_pages: int,
        num_tries: int,
        future: Future[None],
        room: _Room,
    ) -> None:
        room.in_flight.remove(future)
        if not room.in_flight:
            room.seconds += time.monotonic() - room.busy_since
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            room.num_pages += num_pages
            room.num_bytes += writes.total_bytes
        elif num_tries < _NUM_TRIES and not room.is_ending:
            log.warning("room %s on rank %d, trying again: %s", room.name, self._rank, error)
            self._start(writes, num_pages, num_tries + 1, room)
        else:
            self._fail(str(error), room)

    def _fail(self, error: str, room: _Room) -> None:
        room.error = room.error or error
        self._drop(room)

    def _close(self, room: _Room) -> None:
        room.is_closing = True
        self._drop(room)

    @staticmethod
    def _drop(room: _Room) -> None:
        for future in list(room.in_flight):
            future.cancel()
