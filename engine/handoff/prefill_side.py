"""The prefill leader's rooms: what the ranks are told to push, and what their reports amount to.

A room is open on the ranks from its request's start until each of them has reported; so long its
request keeps its pages, whatever became of it. Knows no sockets: what is to be said goes to
`notes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.handoff.note import Note, hand_back
from engine.handoff.room import Outgoing, RoomReport
from engine.messages import Handoff, RoomClosed
from engine.plan import OpenRoom, PushPages
from engine.req import Req
from engine.scheduler.requests import Requests


class PrefillSide:
    """Of one request, in order: `add` when it is submitted, `open` when it starts, `push` with each
    step; then `complete`, or `close` at any time; its end is the last rank's `report`."""

    def __init__(
        self,
        num_ranks: int,
        page_size: int,
        requests: Requests,
        notes: list[Note],
        counts: Counter[str],
    ) -> None:
        self._num_ranks = num_ranks
        self._page_size = page_size
        self._requests = requests
        self._notes = notes
        self._counts = counts  # the scheduler's
        self._rooms: dict[str, Req] = {}
        self._opens: list[OpenRoom] = []
        self._pushes: list[PushPages] = []
        self._closes: list[str] = []
        self.pages_sent = [0] * num_ranks
        self.bytes_sent = [0] * num_ranks
        self.seconds = [0.0] * num_ranks
        self.failures = [0] * num_ranks  # rooms that a rank could not serve

    def __len__(self) -> int:
        return len(self._rooms)

    def knows(self, room: str) -> bool:
        return room in self._rooms

    def serves(self, rid: str) -> bool:
        """It may yet have something to say about this request."""
        return any(req.rid == rid for req in self._rooms.values())

    # -- what the scheduler does with a request

    def add(self, req: Req) -> None:
        self._rooms[_room(req).room] = req

    def open(self, req: Req) -> None:
        """The request starts (again): its ranks will push what it computes."""
        outgoing = _room(req)
        if not outgoing.is_open:
            outgoing.is_open = True
            self._opens.append(OpenRoom(room=outgoing.room, reservation=outgoing.reservation))

    def push(self, req: Req, end: int) -> None:
        """The step computes the request up to `end` tokens: push the pages that are full then, and
        with the last token the last page."""
        outgoing = _room(req)
        is_last = end == len(req.token_ids)
        num_pages = -(-end // self._page_size) if is_last else end // self._page_size
        first = outgoing.num_pushed
        if num_pages > first or is_last:
            self._pushes.append(
                PushPages(
                    room=outgoing.room,
                    pages=req.pages[first:num_pages],
                    positions=list(range(first, num_pages)),
                    is_last=is_last,
                )
            )
            outgoing.num_pushed = max(first, num_pages)

    @property
    def has_orders(self) -> bool:
        """Something for the ranks to do even where nothing is to be computed."""
        return bool(self._closes)

    def take_orders(self) -> tuple[list[OpenRoom], list[PushPages], list[str]]:
        """What the next step does for rooms: those to open, pages to push, those to close."""
        orders = self._opens, self._pushes, self._closes
        self._opens, self._pushes, self._closes = [], [], []
        return orders

    def complete(self, req: Req, token_id: int) -> None:
        """The prefill is done and the first token is out: the request leaves the running set."""
        self._counts["handed_over"] += 1
        self._requests.remove(req)
        _room(req).token_id = token_id
        self._settle(req)

    def close(self, req: Req) -> None:
        """The request ends without a hand-off, whether it waits, runs or is complete."""
        if self._requests.has(req):
            self._requests.remove(req)
        outgoing = _room(req)
        outgoing.is_closing = True
        outgoing.token_id = None
        if outgoing.is_open and len(outgoing.reports) < self._num_ranks:
            self._closes.append(outgoing.room)
        self._settle(req)

    # -- what others say

    def report(self, report: RoomReport) -> None:
        """Fold in a rank's word on a room."""
        self.pages_sent[report.rank] += report.num_pages
        self.bytes_sent[report.rank] += report.num_bytes
        self.seconds[report.rank] += report.seconds
        self.failures[report.rank] += report.status == "failed"
        req = self._rooms.get(report.room)
        if req is None:
            return
        outgoing = _room(req)
        outgoing.reports.append(report)
        self._settle(req)
        if report.status == "failed" and not outgoing.is_closing:
            self._counts["handoffs_failed"] += 1
            self._lose([req], f"the KV could not be handed over: {report.error}")

    def report_in_step(self, report: RoomReport) -> bool:
        """`report` while a step executes: where the request's prefill was complete before and
        nothing has failed. False, and nothing has changed, elsewhere."""
        req = self._rooms.get(report.room)
        if req is None or report.status == "failed" or self._requests.has(req):
            return False
        self.report(report)
        return True

    def close_room(self, room: str) -> bool:
        """The decode worker wants nothing more for it. False where there is no such room."""
        req = self._rooms.get(room)
        if req is not None:
            self.close(req)
        return req is not None

    def close_rooms_of(self, rid: str) -> None:
        """The front end that had the request is gone."""
        for req in [req for req in self._rooms.values() if req.rid == rid]:
            self.close(req)

    def lose_decode(self, name: str) -> None:
        """That decode worker is gone."""
        its = [req for req in self._rooms.values() if _room(req).decode == name]
        self._lose(its, "the decode worker is gone")

    # -- inside

    def _lose(self, reqs: Iterable[Req], reason: str) -> None:
        for req in reqs:
            self._notes.append(hand_back(req, reason))
            self.close(req)

    def _settle(self, req: Req) -> None:
        """End the room where nothing is under way any more."""
        outgoing = _room(req)
        if outgoing.is_open and len(outgoing.reports) < self._num_ranks:
            return
        failures = [report.error for report in outgoing.reports if report.status == "failed"]
        if outgoing.token_id is not None and not failures:
            message: Handoff | RoomClosed = Handoff(room=outgoing.room, token_id=outgoing.token_id)
        elif outgoing.is_closing:
            message = RoomClosed(
                room=outgoing.room, is_quiet=not failures, reason="; ".join(failures)
            )
        else:
            return
        del self._rooms[outgoing.room]
        self._notes.append(Note(message, to=outgoing.decode))
        self._requests.running.give_back(req)


def _room(req: Req) -> Outgoing:
    if req.outgoing is None:
        raise AssertionError(f"request {req.rid!r} has no room")
    return req.outgoing
