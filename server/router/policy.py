"""Which worker gets a request. Pure functions of what is known of each worker at the moment.

Owns the comparison and nothing else: no clock, no state, no fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A live request shares every step until its answer ends. It weighs as this many prompt tokens, so
# that a cached prefix draws requests only as long as that is worth more than an emptier worker.
LIVE_TOKENS = 256
# A page that is sent and not computed costs little and hides under the prefill: tokens that a
# decode worker has to receive count this many times less than tokens to compute.
TRANSFER_DISCOUNT = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one worker. A front end knows its own requests at once; heartbeats lag, but
    count those of all front ends. The larger of the two is taken."""

    key: str
    role: str  # prefill, decode or colocated
    num_live: int  # unfinished requests of this front end
    live_tokens: int  # of those without a first token: prompt tokens not cached here, as estimated
    waiting_tokens: int  # prompt tokens queued, by the last heartbeat
    num_running: int  # by the last heartbeat
    free_pages: int  # free or evictable, by the last heartbeat
    total_pages: int
    page_size: int
    matched_pages: int  # leading pages of the prompt that are cached here
    is_overloaded: bool

    @property
    def live(self) -> int:
        return max(self.num_live, self.num_running)

    @property
    def queued_tokens(self) -> int:
        return max(self.live_tokens, self.waiting_tokens)

    def num_pages(self, num_prompt_tokens: int) -> int:
        """Pages the prompt takes here; where decoding follows, with its first token."""
        num_tokens = num_prompt_tokens + (self.role != "prefill")
        return -(-num_tokens // self.page_size)


# (candidates of one role, tokens of the prompt, turn) -> key of the chosen; None where the prompt
# is too long for each of them or there is none. `turn` is the number of choices made so far for
# this role: round-robin goes by it, the others break ties by it.
Policy = Callable[[Sequence[Candidate], int, int], "str | None"]


def prefix(candidates: Sequence[Candidate], num_prompt_tokens: int, turn: int) -> str | None:
    """The worker with the least work in the way of this request (`cost`). What was just sent
    somewhere counts there, so a prefix that all requests share does not gather them on one worker:
    as soon as its queue outweighs what the prefix saves, the next goes elsewhere, and from then on
    two hold it."""
    usable = _usable(candidates, num_prompt_tokens)
    if not usable:
        return least_loaded(candidates, num_prompt_tokens, turn)
    return _cheapest(usable, num_prompt_tokens, turn, counts_prefix=True)


def least_loaded(candidates: Sequence[Candidate], num_prompt_tokens: int, turn: int) -> str | None:
    """As `prefix`, as if nothing were cached anywhere. Where all are overloaded, the least loaded
    of them: a request is queued there rather than nowhere."""
    usable = _usable(candidates, num_prompt_tokens) or _able(candidates, num_prompt_tokens)
    return _cheapest(usable, num_prompt_tokens, turn, counts_prefix=False)


def round_robin(candidates: Sequence[Candidate], num_prompt_tokens: int, turn: int) -> str | None:
    """Each in turn, in the order of their keys; overloaded ones are passed over."""
    usable = _usable(candidates, num_prompt_tokens)
    if not usable:
        return least_loaded(candidates, num_prompt_tokens, turn)
    return usable[turn % len(usable)].key


POLICIES: dict[str, Policy] = {
    "prefix": prefix,
    "least-loaded": least_loaded,
    "round-robin": round_robin,
}


def cost(candidate: Candidate, num_prompt_tokens: int, matched_pages: int) -> int:
    """What the request meets, in tokens to compute: for one that prefills, the queue before it and
    its own tokens that are not cached; for one that decodes, the requests it shares steps with,
    and for a decode worker the tokens it must be sent. Colocated workers do the first two."""
    uncached = max(1, num_prompt_tokens - matched_pages * candidate.page_size)
    decoding = LIVE_TOKENS * candidate.live
    if candidate.role == "decode":
        return decoding + uncached // TRANSFER_DISCOUNT
    prefilling = candidate.queued_tokens + uncached
    return prefilling if candidate.role == "prefill" else prefilling + decoding


def _cheapest(
    candidates: Sequence[Candidate], num_prompt_tokens: int, turn: int, *, counts_prefix: bool
) -> str | None:
    """By: has room now, cost, live requests, turn. A prefill group's pages come back as its queue
    moves, which the cost counts; elsewhere they are held until answers end, so a worker where the
    prompt would have to wait for pages comes after all that have them."""

    def rank(place: int) -> tuple[bool, int, int, int]:
        candidate = candidates[place]
        matched = candidate.matched_pages if counts_prefix else 0
        missing = candidate.num_pages(num_prompt_tokens) - candidate.matched_pages
        waits = candidate.role != "prefill" and missing > candidate.free_pages
        in_turn = (place - turn) % len(candidates)
        return waits, cost(candidate, num_prompt_tokens, matched), candidate.live, in_turn

    if not candidates:
        return None
    return candidates[min(range(len(candidates)), key=rank)].key


def _able(candidates: Sequence[Candidate], num_prompt_tokens: int) -> list[Candidate]:
    """Those whose pool can hold the prompt at all, by key. A decode worker needs room for the first
    token, too; elsewhere nothing need follow the prompt."""
    able = [
        c
        for c in candidates
        if num_prompt_tokens + (c.role == "decode") <= c.total_pages * c.page_size
    ]
    return sorted(able, key=lambda candidate: candidate.key)


def _usable(candidates: Sequence[Candidate], num_prompt_tokens: int) -> list[Candidate]:
    return [c for c in _able(candidates, num_prompt_tokens) if not c.is_overloaded]
