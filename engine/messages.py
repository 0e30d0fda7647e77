"""The messages between front end and worker, and between a group's leader and its other ranks:
tagged msgspec structs, nothing else on the wire."""

from __future__ import annotations

import msgspec

from engine.plan import StepPlan
from engine.types import Load, MetricFamily, Request, TokenOut


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a request. `output_ids` are tokens the client already has: a replay goes on after them
    and its TokenOut.index starts at len(output_ids)."""

    request: Request
    output_ids: list[int] = []


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request and free what it holds. Unknown rids are ignored. Answered by
    TokenOut(finish_reason="abort") where the request was still alive."""

    rid: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Accept nothing new; exit with code 0 when the last running request is done."""


ToWorker = Submit | Abort | Drain


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A worker is ready to serve. Each process has a new `instance_id`: a restart is no blip."""

    instance_id: str
    role: str  # "colocated"
    pid: int
    model: str
    vocab_size: int
    context_length: int  # prompt + output tokens of one request, at most
    page_size: int
    total_pages: int


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step produced."""

    outs: list[TokenOut]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent about twice a second, also during a long step, and at once when a worker falls idle."""

    load: Load
    metrics: list[MetricFamily] = []


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The worker leaves on purpose; nothing of it is running any more."""


ToFrontend = Hello | Outputs | Heartbeat | Goodbye


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """To each rank once: what the leader settled for all, and where they meet."""

    store_file: str  # of the rendezvous: a file that only this user can reach
    page_size: int
    num_pages: int  # physical, of each rank
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


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot go on and ends. Its group ends with it."""

    rank: int
    error: str


ToLeader = RankReady | RankBeat | StepDone | RankFailed
