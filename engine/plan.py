"""The step plan: all that one step does, decided by the leader, executed by every rank.

A plan is a frozen value of logical numbers (pages, positions, token ids); it can be broadcast as
it is. Ranks keep a page table and sampling state by `req_index`, which plans fill and clear;
nothing on a rank allocates, evicts or decides.
"""

from __future__ import annotations

import msgspec

from engine.handoff.room import Reservation
from engine.types import SamplingParams, TokenLogprob
from kvcache.host_plan import HostOrders


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A request enters the running set at `req_index` (dense, reused after it has finished)."""

    req_index: int
    sampling: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int] = []  # already generated: after a retraction or a replay


class Extend(msgspec.Struct, frozen=True, kw_only=True):
    """One request's share of a step: its tokens [start, start + len(token_ids)).

    Before the forward, page_table[req_index][page_start:][:len(pages)] = pages. The context of the
    last token is then all of [0, start + len(token_ids)).
    """

    req_index: int
    token_ids: list[int]  # one for a decode
    start: int  # absolute position of token_ids[0] = tokens already in the cache
    page_start: int = 0
    pages: list[int] = []  # logical
    samples: bool = True  # a token is sampled from the last position's logits
    # Where prompt log-probabilities are wanted: the prompt's tokens from start + 1 on; target i is
    # scored by the logits of token_ids[i].
    targets: list[int] = []


class OpenRoom(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of this room will be pushed there. Every rank reports once for it, in the end."""

    room: str
    reservation: Reservation


class PushPages(msgspec.Struct, frozen=True, kw_only=True):
    """After the step's forward: push these pages, each rank those that it owns."""

    room: str
    pages: list[int]  # logical
    positions: list[int]  # of each page in its request
    is_last: bool  # nothing of the room follows


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    # req_index whose state is dropped before this step; unknown ones are ignored
    finished: list[int] = []
    starts: list[Start] = []  # after those were dropped: an index may be in both
    extends: list[Extend] = []  # the batch, in order; empty: nothing is computed
    open_rooms: list[OpenRoom] = []  # before the forward, like those to close
    pushes: list[PushPages] = []  # after the forward
    close_rooms: list[str] = []  # push nothing more for these
    # Copies between the tiers: they begin before the forward, which waits for the load-backs
    host: HostOrders = msgspec.field(default_factory=HostOrders)


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """What a step found for one Extend, in the plan's order."""

    req_index: int
    token_id: int | None = None  # None where the Extend does not sample
    logprob: TokenLogprob | None = None
    target_logprobs: list[TokenLogprob] = []  # as long as the Extend's targets


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    sampled: list[Sampled]
    seconds: dict[str, float] = {}  # by phase: prepare, forward, sample
