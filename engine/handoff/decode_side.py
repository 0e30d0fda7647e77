"""The decode worker's rooms: requests whose KV is under way, and pages that bytes may still enter.

A page is fenced from the moment its request gives it up until the prefill side has confirmed that
nothing comes any more; where that side is gone or cannot know, for a lease. Knows no sockets: what
is to be said goes to `notes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.handoff.note import Note
from engine.handoff.room import Incoming, Reservation
from engine.messages import CloseRoom, HandBack, Prefill, RoomClosed
from engine.req import Req
from engine.scheduler.running import RunningSet
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


@dataclass(slots=True)
class _Fence:
    pages: list[int]
    prefill_address: str
    looks_left: int | None = None  # None: the prefill side will confirm


class DecodeSide:
    def __init__(
        self,
        cache: PrefixCache,
        running: RunningSet,
        notes: list[Note],
        destination: Destination | None,
    ) -> None:
        self._cache = cache
        self._running = running
        self._notes = notes
        self._destination = destination
        self._wanted: set[str] = set()  # of requests that wait for pages
        self._rooms: dict[str, Req] = {}
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

    def expect(self, req: Req) -> None:
        """The request waits for pages; its room is taken from now on."""
        self._wanted.add(_room(req).room)

    def give_up(self, req: Req) -> None:
        """The request has ended while it waited for pages."""
        self._wanted.discard(_room(req).room)

    def has(self, prefill_address: str) -> bool:
        """A room or a fence that this prefill group may yet say something about."""
        rooms = (_room(req).prefill_address for req in self._rooms.values())
        fences = (fence.prefill_address for fence in self._fences.values())
        return prefill_address in {*rooms, *fences}

    def get(self, room: str) -> Req | None:
        return self._rooms.get(room)

    def ask(self, req: Req, page_size: int) -> None:
        """The request has its pages: have them filled."""
        incoming = _room(req)
        if self._destination is None:
            raise AssertionError("this worker has no transfer engine")
        self._wanted.discard(incoming.room)
        self._rooms[incoming.room] = req
        first = req.num_tree // page_size
        num_pages = -(-len(req.token_ids) // page_size)
        reservation = Reservation(
            session=self._destination.session,
            pool=self._destination.pool,
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

    def arrive(self, room: str, token_id: int) -> Req:
        """All of the request's KV is here: it is an ordinary one from now on, about to decode."""
        req = self._rooms.pop(room)
        req.incoming = None
        req.num_computed = len(req.token_ids)
        req.num_pages_known = 0
        req.token_ids.append(token_id)
        req.num_emitted = req.num_output
        return req

    def close(self, req: Req) -> None:
        """The request has ended, and left the running set, before its KV was here."""
        incoming = _room(req)
        del self._rooms[incoming.room]
        self._fence(req, incoming)
        self._notes.append(Note(CloseRoom(incoming.room), to=incoming.prefill_address))

    def closed(self, message: RoomClosed) -> Req | None:
        """The prefill side is done with a room. The request that ends here with it, after it has
        left the running set at the caller's; None where it was given up before."""
        if message.room in self._fences:
            self._settle(message)
        return self._rooms.pop(message.room, None)

    def end(self, req: Req, message: RoomClosed) -> None:
        """Give up what `closed` returned."""
        incoming = _room(req)
        self._fence(req, incoming)
        self._settle(message)
        if message.reason:
            self.hand_back(req, message.reason)

    def lose(self, prefill_address: str) -> list[Req]:
        """That prefill group does not answer any more: the requests that waited for it. They are to
        be removed from the running set and given to `abandon`."""
        for fence in self._fences.values():
            if fence.prefill_address == prefill_address and fence.looks_left is None:
                fence.looks_left = LEASE_LOOKS
        return [r for r in self._rooms.values() if _room(r).prefill_address == prefill_address]

    def abandon(self, req: Req, reason: str) -> None:
        incoming = _room(req)
        del self._rooms[incoming.room]
        self._fence(req, incoming)
        self._fences[incoming.room].looks_left = LEASE_LOOKS
        self.hand_back(req, reason)

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

    def hand_back(self, req: Req, reason: str) -> None:
        """Let the front end replay it elsewhere."""
        self._notes.append(Note(HandBack(rid=req.rid, attempt=req.attempt, reason=reason)))

    def _fence(self, req: Req, incoming: Incoming) -> None:
        pages = self._running.take_own(req)
        self._fences[incoming.room] = _Fence(pages, incoming.prefill_address)

    def _settle(self, message: RoomClosed) -> None:
        """The prefill side has said whether bytes may still come."""
        if message.is_quiet:
            self._lift(message.room)
        else:
            self._fences[message.room].looks_left = LEASE_LOOKS

    def _lift(self, room: str) -> None:
        self._cache.free(self._fences.pop(room).pages)


def _room(req: Req) -> Incoming:
    if req.incoming is None:
        raise AssertionError(f"request {req.rid!r} has no room")
    return req.incoming
