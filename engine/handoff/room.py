"""What the two sides of a hand-off tell each other about one room: values for the wire.

A room is one request's transfer from one prefill group to one decode worker. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from engine.types import ModelId
from kvcache.transfer.record import PoolRecord


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the decode worker wants the pages of a request.

    The page at request page position p >= first_position belongs into row page
    dst_pages[p - first_position] of `pool`; earlier ones are there already.
    """

    session: str  # of the decode worker's transfer engine, "host:port"
    pool: PoolRecord
    model_id: ModelId  # what the decode worker goes on with
    first_position: int
    dst_pages: list[int]


class RoomReport(msgspec.Struct, frozen=True, kw_only=True, tag="room"):
    """One from every rank for every room that was opened there, also when it owned no page.

    "done": all of the rank's bytes are in the decode worker's memory. "failed", "closed": no write
    of the room is running any more and none will start; but after "failed" bytes of a write that
    was given up may arrive for kvcache.transfer.base.LATE_BYTES_S yet.
    """

    rank: int
    room: str
    status: Literal["done", "failed", "closed"]
    error: str = ""
    num_pages: int = 0  # sent by this rank
    num_bytes: int = 0
    seconds: float = 0.0  # in which at least one write was running


@dataclass(slots=True)
class Outgoing:
    """A room as the prefill group's leader sees it; owned by its scheduler."""

    room: str
    decode: str  # the decode worker, by the name it registered with
    reservation: Reservation
    num_pushed: int  # request pages that the ranks were told to push, or that need not be
    is_open: bool = False  # the ranks know it
    is_closing: bool = False
    reports: list[RoomReport] = field(default_factory=list)
    token_id: int | None = None  # the first token, once the prefill is complete


@dataclass(slots=True)
class Incoming:
    """A room as the decode worker sees it; owned by its scheduler."""

    room: str
    prefill_address: str
    frontend: str  # who wants the first token, by the name it registered with
    traceparent: str = ""
