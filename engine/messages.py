"""The messages between front end and worker: tagged msgspec structs, nothing else on the wire."""

from __future__ import annotations

import msgspec

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
