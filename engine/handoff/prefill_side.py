"""The prefill leader's rooms: what the ranks are told to push, and what their reports amount to.

A room is open on the ranks from its request's start until each of them has reported; so long its
request keeps its pages, whatever became of it. Knows no sockets: what is to be said goes to
`notes`.
"""

from __future__ import annotations

from engine.handoff.note import Note
from engine.handoff.room import Outgoing, RoomReport
from engine.messages import HandBack, Handoff, RoomClosed
from engine.plan import OpenRoom, PushPages
from engine.req import Req
from engine.scheduler.running import RunningSet


class PrefillSide:
    def __init__(
        self, num_ranks: int, page_size: int, running: RunningSet, notes: list[Note]
    ) -> None:
        self._num_ranks = num_ranks
        self._page_size = page_size
        self._running = running
        self._notes = notes
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

    @property
    def has_orders(self) -> bool:
        """Something for the ranks to do even where nothing is to be computed."""
        return bool(self._closes)

    def get(self, room: str) -> Req | None:
        return self._rooms.get(room)

    def of_request(self, rid: str) -> list[Req]:
        return [req for req in self._rooms.values() if req.rid == rid]

    def of_decode(self, name: str) -> list[Req]:
        """The requests whose KV goes to this worker."""
        return [r for r in self._rooms.values() if r.outgoing and r.outgoing.decode == name]

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

    def take_orders(self) -> tuple[list[OpenRoom], list[PushPages], list[str]]:
        """What the next step does for rooms: those to open, pages to push, those to close."""
        orders = self._opens, self._pushes, self._closes
        self._opens, self._pushes, self._closes = [], [], []
        return orders

    def complete(self, req: Req, token_id: int) -> None:
        """The prefill is done, the first token is out, the request has left the running set."""
        _room(req).token_id = token_id
        self._settle(req)

    def close(self, req: Req) -> None:
        """The request has ended, and left the running set, without a hand-off."""
        outgoing = _room(req)
        outgoing.is_closing = True
        outgoing.token_id = None
        if outgoing.is_open and len(outgoing.reports) < self._num_ranks:
            self._closes.append(outgoing.room)
        self._settle(req)

    def report(self, report: RoomReport) -> Req | None:
        """Fold in what a rank says. The request, where it cannot go on because of it."""
        self.pages_sent[report.rank] += report.num_pages
        self.bytes_sent[report.rank] += report.num_bytes
        self.seconds[report.rank] += report.seconds
        self.failures[report.rank] += report.status == "failed"
        req = self._rooms.get(report.room)
        if req is None:
            return None
        outgoing = _room(req)
        outgoing.reports.append(report)
        self._settle(req)
        is_lost = report.status == "failed" and not outgoing.is_closing
        return req if is_lost else None

    def hand_back(self, req: Req, reason: str) -> None:
        """Let the front end replay it elsewhere."""
        self._notes.append(Note(HandBack(rid=req.rid, attempt=req.attempt, reason=reason)))

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
        self._running.give_back(req)


def _room(req: Req) -> Outgoing:
    if req.outgoing is None:
        raise AssertionError(f"request {req.rid!r} has no room")
    return req.outgoing
