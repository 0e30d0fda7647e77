"""What a scheduler wants said beside its outputs: a value; the worker's loop sends it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.messages import CloseRoom, HandBack, Handoff, Prefill, RoomClosed
from engine.req import Req


@dataclass(frozen=True, slots=True)
class Note:
    """`to`: the name of a decode worker, the address of a prefill group, or empty: the front end
    that has the request."""

    message: Prefill | CloseRoom | Handoff | RoomClosed | HandBack
    to: str = ""


def hand_back(req: Req, reason: str) -> Note:
    """Let the front end replay it elsewhere."""
    return Note(HandBack(rid=req.rid, attempt=req.attempt, reason=reason))
