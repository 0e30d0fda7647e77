"""The decode worker's rooms: requests whose KV is under way, and pages that bytes may still enter.

A page is fenced from the moment its request gives it up until the prefill side has confirmed that
nothing comes any more; where that side is gone or cannot know, for a lease. Knows no sockets: what
is to be said goes to `notes`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.handoff.note import Note, hand_back
from engine.handoff.room import Incoming, Reservation
from engine.messages import CloseRoom, Prefill, RoomClosed
from engine.req import Req
from engine.scheduler.requests import Requests
from engine.types import ModelId
from kvcache.prefix_cache import PrefixCache
from kvcache.transfer.record import PoolRecord

# In looks of two seconds. A sender that is gone for good has its last bytes in this machine's
# buffers at most; one that is out of reach may go on once it is back.
GONE_LOOKS = 2
LEASE_LOOKS = 15


@dataclass(frozen=True, slots=True)
class Destination:
    """Where bytes for this worker go."""

    session: str  # "host:port" of its transfer engine
    pool: PoolRecord
    model_id: ModelId


@dataclass(slots=True)
class _Fence:
    pages: list[int]
    prefill_address: str
    looks_left: int | None = None  # None: the prefill side will confirm


class DecodeSide:
    """Of one request, in order: `expect` when it is submitted, `ask` when it has its pages, then
    `arrive`; or, at any time before, `close`, `room_closed` or `lose_prefill`."""

    def __init__(
        self,
        cache: PrefixCache,
        requests: Requests,
        notes: list[Note],
        counts: Counter[str],
        destination: Destination | None,
    ) -> None:
        self._cache = cache
        self._requests = requests
        self._notes = notes
        self._counts = counts  # the scheduler's
        self._destination = destination
        self._wanted: set[str] = set()  # of requests that wait for pages
        self._rooms: dict[str, Req] = {}
        self._arrived: list[Req] = []  # since the last step
        self._fences: dict[str, _Fence] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def is_quiet(self) -> bool:
        return not self._rooms and not self._fences

    @property
    def fenced_pages(self) -> int:
        return sum(len(fence.pages) for fence in self._fences.values())

    def knows(self, room: str) -> bool:
        return room in self._rooms or room in self._fences or room in self._wanted

    def has(self, prefill_address: str) -> bool:
        """A room or a fence that this prefill group may yet say something about."""
        rooms = (_room(req).prefill_address for req in self._rooms.values())
        fences = (fence.prefill_address for fence in self._fences.values())
        return prefill_address in {*rooms, *fences}

    # -- what the scheduler does with a request

    def expect(self, req: Req) -> None:
        """The request waits for pages; its room is taken from now on."""
        self._wanted.add(_room(req).room)

    def ask(self, req: Req) -> None:
        """The request has its pages: have them filled."""
        incoming, page_size = _room(req), self._cache.page_size
        if self._destination is None:
            raise AssertionError("this worker has no transfer engine")
        self._wanted.discard(incoming.room)
        self._rooms[incoming.room] = req
        first = req.num_tree // page_size
        num_pages = -(-len(req.token_ids) // page_size)
        reservation = Reservation(
            session=self._destination.session,
            pool=self._destination.pool,
            model_id=self._destination.model_id,
            first_position=first,
            dst_pages=req.pages[first:num_pages],
        )
        message = Prefill(
            room=incoming.room,
            frontend=incoming.frontend,
            request=req.request,
            output_ids=req.token_ids[req.num_prompt :],
            attempt=req.attempt,
            reservation=reservation,
            traceparent=incoming.traceparent,
        )
        self._notes.append(Note(message, to=incoming.prefill_address))

    def take_arrived(self) -> list[Req]:
        """Those whose KV has come since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self, req: Req) -> None:
        """The request ends before its KV is here."""
        incoming = _room(req)
        self._requests.remove(req)
        if incoming.room in self._wanted:  # nobody was asked
            self._wanted.remove(incoming.room)
            return
        del self._rooms[incoming.room]
        self._fence(req)
        self._notes.append(Note(CloseRoom(incoming.room), to=incoming.prefill_address))

    # -- what the prefill side says

    def arrive(self, room: str, token_id: int) -> bool:
        """All of the request's KV is here, and `token_id` is its next token: it is an ordinary one
        from now on, about to decode. False where there is no such room."""
        req = self._rooms.pop(room, None)
        if req is None:
            return False
        self._counts["handed_over"] += 1
        req.incoming = None
        req.num_computed = len(req.token_ids)
        req.num_pages_known = 0
        req.token_ids.append(token_id)
        req.num_emitted = req.num_output
        self._requests.running.keep_prompt(req)
        self._arrived.append(req)
        return True

    def room_closed(self, message: RoomClosed) -> bool:
        """It is done with a room and hands nothing over. False where there is no such room."""
        is_known = self.knows(message.room)
        req = self._rooms.pop(message.room, None)
        if req is not None:
            self._requests.remove(req)
            self._fence(req)
            if message.reason:
                self._notes.append(hand_back(req, message.reason))
        if message.room in self._fences:
            if message.is_quiet:
                self._lift(message.room)
            else:  # bytes may still come
                self._fences[message.room].looks_left = LEASE_LOOKS
        return is_known

    def lose_prefill(self, address: str) -> None:
        """That prefill group does not answer any more."""
        for req in list(self._rooms.values()):
            incoming = _room(req)
            if incoming.prefill_address == address:
                del self._rooms[incoming.room]
                self._requests.remove(req)
                self._fence(req)
                self._notes.append(hand_back(req, "the prefill group is gone"))
        for fence in self._fences.values():
            if fence.prefill_address == address and fence.looks_left is None:
                fence.looks_left = LEASE_LOOKS

    def replaced(self, prefill_address: str) -> None:
        """Another process listens there now: the one before it is gone for good."""
        for fence in self._fences.values():
            if fence.prefill_address == prefill_address and fence.looks_left is not None:
                fence.looks_left = min(fence.looks_left, GONE_LOOKS)

    def look(self) -> None:
        """Every two seconds: leases run out."""
        for room, fence in list(self._fences.items()):
            if fence.looks_left is not None:
                fence.looks_left -= 1
                if fence.looks_left <= 0:
                    self._lift(room)

    # -- inside

    def _fence(self, req: Req) -> None:
        incoming = _room(req)
        pages = self._requests.running.take_own(req)
        self._fences[incoming.room] = _Fence(pages, incoming.prefill_address)

    def _lift(self, room: str) -> None:
        self._cache.device.free(self._fences.pop(room).pages)


def _room(req: Req) -> Incoming:
    if req.incoming is None:
        raise AssertionError(f"request {req.rid!r} has no room")
    return req.incoming
