"""The requests of one worker by id: those that wait, and hold no page, and those that run.

A prefill that is complete is neither any more: its room keeps it (engine.handoff.prefill_side).
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.req import Req
from engine.scheduler.running import RunningSet
from engine.scheduler.waiting import WaitingQueue


class Requests:
    """Who is where, and nothing of what they compute: the way in and the way out."""

    def __init__(self, running: RunningSet) -> None:
        self.waiting = WaitingQueue()
        self.running = running
        self._by_rid: dict[str, Req] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Req]:
        """By submission, over a snapshot: the caller may remove what it visits."""
        return iter(tuple(self._by_rid.values()))

    def get(self, rid: str) -> Req | None:
        return self._by_rid.get(rid)

    def has(self, req: Req) -> bool:
        """This very one, not another attempt of it."""
        return self._by_rid.get(req.rid) is req

    def add(self, req: Req) -> None:
        """It waits from now on."""
        self._by_rid[req.rid] = req
        self.waiting.push(req)

    def start(self, req: Req) -> None:
        """One that waits, and has its pages, runs from now on."""
        self.waiting.remove(req)
        self.running.add(req)

    def remove(self, req: Req) -> None:
        """It neither waits nor runs any more; its pages are still its own."""
        del self._by_rid[req.rid]
        if req.req_index < 0:
            self.waiting.remove(req)
        else:
            self.running.remove(req)
