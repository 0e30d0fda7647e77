"""The messages between front ends and workers, between workers, and between a group's leader and
its other ranks: tagged msgspec structs, nothing else on the wire."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.handoff.room import Reservation, RoomReport
from engine.plan import StepPlan
from engine.types import Load, MetricFamily, ModelId, Request, Role, TokenOut
from kvcache.events import KVEvents

PeerKind = Literal["frontend", "worker"]


class Register(msgspec.Struct, frozen=True, kw_only=True, tag="register"):
    """The first message of every connection to a worker: who is there. Answered by a Hello. Where
    `name` registers anew, what it had asked for over an earlier connection is given up."""

    kind: PeerKind
    name: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Nothing but a sign of life, about once a second."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request is prefilled for the decode worker that is given this."""

    room: str  # random, 128 bits in hex: names this hand-off for ever
    prefill_address: str  # where the group's leader listens


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a request. `output_ids` are tokens the client already has: a replay goes on after them
    and its TokenOut.index starts at len(output_ids). With a route this worker decodes what the
    group named there prefills; without, it does both."""

    request: Request
    output_ids: list[int] = []
    attempt: int = 0  # how often the front end has submitted it before; comes back in TokenOut
    route: Route | None = None
    traceparent: str = ""  # W3C Trace Context: the request's span; empty: it is not traced


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request's attempts up to this one and free what they hold. Unknown ones are ignored.
    Answered by TokenOut(finish_reason="abort") where the request was still alive."""

    rid: str
    attempt: int = 0


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Accept nothing new; exit with code 0 when the last running request is done."""


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """A decode worker has reserved pages: prefill the request and push its KV there. The first
    token goes to the front end from here. Answered, once, by Handoff or RoomClosed."""

    room: str
    frontend: str  # by the name that it registered with
    request: Request
    output_ids: list[int]
    attempt: int
    reservation: Reservation
    traceparent: str = ""


class CloseRoom(msgspec.Struct, frozen=True, tag="close_room"):
    """Push nothing more for the room. Answered by RoomClosed once no byte can come any more; for an
    unknown room at once."""

    room: str


ToWorker = Register | Alive | Submit | Abort | Drain | Prefill | CloseRoom


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A worker is ready to serve. Each process has a new `instance_id`: a restart is no blip."""

    instance_id: str
    role: Role
    pid: int
    host: str
    model: str
    vocab_size: int
    context_length: int  # prompt + output tokens of one request, at most
    page_size: int
    total_pages: int
    model_id: ModelId
    cp_size: int = 1
    # Of the prefix hashes in its KVEvents: see kvcache.events.
    hash_salt: str = ""


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step produced."""

    outs: list[TokenOut]


class HandBack(msgspec.Struct, frozen=True, kw_only=True, tag="hand_back"):
    """An attempt cannot go on here, through no fault of the request: replay it elsewhere."""

    rid: str
    attempt: int
    reason: str
    is_overloaded: bool = False  # the worker takes nothing for some seconds


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent about twice a second, also during a long step, and at once when a worker falls idle."""

    load: Load
    metrics: list[MetricFamily] = []


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The worker leaves on purpose; nothing of it is running any more."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, tag="handoff"):
    """All ranks' pages of the room are in the decode worker's memory: go on after `token_id`, which
    the front end has been sent."""

    room: str
    token_id: int


class RoomClosed(msgspec.Struct, frozen=True, kw_only=True, tag="room_closed"):
    """The room ends without a hand-off. With `is_quiet` no byte of it can come any more; without, a
    write failed in a way that leaves this open."""

    room: str
    is_quiet: bool = True
    reason: str = ""  # empty: the request itself has ended, or closing was asked for


ToDialer = (
    Hello | Outputs | HandBack | Heartbeat | Goodbye | KVEvents | Handoff | RoomClosed | Alive
)


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """To each rank once: what the leader settled for all, and where they meet."""

    store_file: str  # of the rendezvous: a file that only this user can reach
    page_size: int
    num_pages: int  # physical, of each rank
    num_host_pages: int = 0  # the same of its host pool; 0: there is none
    context_length: int


class RunStep(msgspec.Struct, frozen=True, tag="run"):
    """Execute a plan and report."""

    plan: StepPlan


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End with exit code 0."""


ToRank = Setup | RunStep | Stop


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    rank: int


class RankBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Twice a second, also during a long step."""

    rank: int


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """One from every rank for every step, whether or not it had tokens to compute."""

    rank: int
    step: int
    gathered_bytes: int  # received from other ranks, since the start
    gather_wait_s: float  # waited for them, since the start
    load_back_wait_s: float = 0.0  # forwards waited for load-backs, since the start


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag="host"):
    """One from every rank for every copy between the tiers, also where it owned no page: its part
    is done, or has failed with `error`. The numbers are the rank's, since its start."""

    rank: int
    item: int
    error: str = ""
    num_bytes: dict[str, int] = {}  # "backup", "load_back"
    seconds: dict[str, float] = {}


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot go on and ends. Its group ends with it."""

    rank: int
    error: str


ToLeader = RankReady | RankBeat | StepDone | RankFailed | RoomReport | HostReport
