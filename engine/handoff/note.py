"""What a scheduler wants said beside its outputs: a value; the worker's loop sends it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.messages import CloseRoom, HandBack, Handoff, Prefill, RoomClosed


@dataclass(frozen=True, slots=True)
class Note:
    """`to`: the name of a decode worker, the address of a prefill group, or empty: the front end
    that has the request."""

    message: Prefill | CloseRoom | Handoff | RoomClosed | HandBack
    to: str = ""
