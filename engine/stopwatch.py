"""When each request of a worker passes from one stage to the next: for metrics and for traces.

    here alone    queue -> prefill -> decode
    prefilled     queue -> prefill -> handoff     until all ranks have reported
    decoded       reserve -> receive -> decode    until the KV is here, then to the last token

Told what the inbox takes and sends. Owns the clock; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.messages import (
    CloseRoom,
    HandBack,
    Handoff,
    Prefill,
    RoomClosed,
    Submit,
    ToDialer,
    ToWorker,
)
from engine.tracing import NO_TRACER, Tracer
from engine.types import TokenOut

# The histograms that a completed stage is entered in.
QUEUE = "plait_queue_seconds"
PREFILL = "plait_prefill_seconds"
RESERVE_WAIT = "plait_handoff_reserve_wait_seconds"
WAIT = "plait_handoff_wait_seconds"
HANDOFF_QUEUE = "plait_handoff_queue_seconds"
TAIL = "plait_handoff_tail_seconds"


def _ignore(family: str, seconds: float) -> None:
    pass


@dataclass(slots=True)
class _Course:
    """One attempt of one request."""

    rid: str
    attempt: int
    num_prompt: int
    room: str  # empty: it is prefilled and decoded here
    is_outgoing: bool  # its KV goes from here to a decode worker
    traceparent: str
    stage: str
    since_s: float

    @property
    def families(self) -> tuple[str, ...]:
        """Of the present stage."""
        match self.stage:
            case "queue":
                return (QUEUE, HANDOFF_QUEUE) if self.is_outgoing else (QUEUE,)
            case "prefill":
                return (PREFILL,)
            case "handoff":
                return (TAIL,)
            case "reserve":
                return (RESERVE_WAIT,)
            case "receive":
                return (WAIT,)
            case _:
                return ()


class Stopwatch:
    """`observe` takes a family's name and seconds. What ends unseen is dropped by `forget`."""

    def __init__(
        self,
        observe: Callable[[str, float], None] = _ignore,
        tracer: Tracer = NO_TRACER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observe = observe
        self._tracer = tracer
        self._clock = clock
        self._courses: dict[tuple[str, int], _Course] = {}  # by rid and attempt
        self._rooms: dict[str, _Course] = {}

    def __len__(self) -> int:
        return len(self._courses)

    def begin(self, message: Submit | Prefill) -> None:
        """The scheduler is given this."""
        is_outgoing = isinstance(message, Prefill)
        room = message.room if isinstance(message, Prefill) else ""
        if isinstance(message, Submit) and message.route is not None:
            room = message.route.room
        course = _Course(
            rid=message.request.rid,
            attempt=message.attempt,
            num_prompt=len(message.request.token_ids),
            room=room,
            is_outgoing=is_outgoing,
            traceparent=message.traceparent,
            stage="reserve" if room and not is_outgoing else "queue",
            since_s=self._clock(),
        )
        before = self._courses.get((course.rid, course.attempt))
        if before is not None:
            self._fail(before, "")
        self._courses[course.rid, course.attempt] = course
        if room:
            self._rooms[room] = course

    def started(self, rid: str, attempt: int) -> None:
        """The next step computes it; told again after a retraction."""
        course = self._courses.get((rid, attempt))
        if course is not None and course.stage == "queue":
            self._pass(course, "prefill")

    def told(self, out: TokenOut) -> None:
        """A front end is told this."""
        course = self._courses.get((out.rid, out.attempt))
        if course is None:
            return
        if out.finish_reason in ("abort", "error"):
            self._fail(course, out.error or out.finish_reason)
        elif out.finish_reason is not None:
            self._pass(course, None)
        elif out.ids and course.stage == "prefill":
            self._pass(course, "handoff" if course.is_outgoing else "decode")

    def sent(self, message: ToWorker | ToDialer) -> None:
        """A note of the scheduler's."""
        match message:
            case Prefill(room=room):
                self._pass_room(room, "reserve", "receive")
            case Handoff(room=room):
                self._pass_room(room, "handoff", None)
            case RoomClosed(room=room, reason=reason):
                self._fail_room(room, reason)
            case CloseRoom(room=room):
                self._fail_room(room, "")
            case HandBack(rid=rid, attempt=attempt, reason=reason):
                course = self._courses.get((rid, attempt))
                if course is not None:
                    self._fail(course, reason)

    def heard(self, message: Handoff | RoomClosed) -> None:
        """What the prefill group says."""
        if isinstance(message, Handoff):
            self._pass_room(message.room, "receive", "decode")
        else:
            self._fail_room(message.room, message.reason)

    def forget(self, knows: Callable[[str], bool]) -> None:
        """Drop the requests that the scheduler does not know any more."""
        for course in list(self._courses.values()):
            if not knows(course.rid):
                self._fail(course, "")

    def _pass_room(self, room: str, stage: str, following: str | None) -> None:
        course = self._rooms.get(room)
        if course is not None and course.stage == stage:
            self._pass(course, following)

    def _fail_room(self, room: str, error: str) -> None:
        course = self._rooms.get(room)
        if course is not None:
            self._fail(course, error)

    def _pass(self, course: _Course, following: str | None) -> None:
        """The present stage is complete; the request ends with it where nothing follows."""
        now_s = self._clock()
        for family in course.families:
            self._observe(family, now_s - course.since_s)
        self._write(course, now_s, "")
        if following is None:
            self._drop(course)
        else:
            course.stage, course.since_s = following, now_s

    def _fail(self, course: _Course, error: str) -> None:
        """The request ends in mid-stage: that counts in no histogram."""
        self._write(course, self._clock(), error or "the request was given up")
        self._drop(course)

    def _write(self, course: _Course, now_s: float, error: str) -> None:
        if course.traceparent:
            attributes: dict[str, str | int] = {
                "plait.rid": course.rid,
                "plait.attempt": course.attempt,
                "plait.prompt_tokens": course.num_prompt,
            }
            if course.room:
                attributes["plait.room"] = course.room
            self._tracer.write(
                course.stage, course.traceparent, course.since_s, now_s, attributes, error
            )

    def _drop(self, course: _Course) -> None:
        self._courses.pop((course.rid, course.attempt), None)
        if self._rooms.get(course.room) is course:
            del self._rooms[course.room]
