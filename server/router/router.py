"""Where a request goes: the fleet, the index and the hints put before a policy.

Owned by the event loop; the index is fed by the reader thread. Knows no socket and no text.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from server.dispatch.fleet import Fleet, Worker
from server.router.overload import OverloadHints
from server.router.policy import POLICIES, Candidate
from server.router.prefix_index import PrefixIndex

OVERLOAD_HOLD_S = 5.0


@dataclass(frozen=True, slots=True)
class Choice:
    """`first` computes the prompt and the first token; `decode` the rest, None where that is
    `first` too or nothing follows. `matched_tokens` of the prompt should be cached at `first`."""

    first: Worker
    decode: Worker | None
    matched_tokens: int


class Router:
    def __init__(self, fleet: Fleet, policy: str = "prefix") -> None:
        self.policy = policy
        self.index = PrefixIndex()
        self.hints = OverloadHints(OVERLOAD_HOLD_S, time.monotonic)
        self._fleet = fleet
        self._turns: Counter[str] = Counter()

    def choose(
        self, num_tokens: int, hashes: Sequence[bytes], *, needs_decode: bool
    ) -> Choice | None:
        """For a request of `num_tokens` tokens whose whole pages have these hashes; None where
        nobody can take it now. A pair is preferred where there is one."""
        decode = self._pick("decode", num_tokens, hashes) if needs_decode else None
        first = None
        if decode is not None or not needs_decode:
            first = self._pick("prefill", num_tokens, hashes)
        if first is None:
            first, decode = self._pick("colocated", num_tokens, hashes), None
        if first is None:
            return None
        worker, matched_tokens = first
        return Choice(worker, decode[0] if decode is not None else None, matched_tokens)

    def _pick(
        self, role: str, num_tokens: int, hashes: Sequence[bytes]
    ) -> tuple[Worker, int] | None:
        """A worker of this role and how many of the prompt's tokens it should have cached."""
        workers = [w for w in self._fleet if w.hello.role == role and w.takes_requests]
        matched = self.index.matched(hashes, [worker.address for worker in workers])
        candidates = [self._candidate(worker, matched[worker.address]) for worker in workers]
        key = POLICIES[self.policy](candidates, num_tokens, self._turns[role])
        if key is None:
            return None
        self._turns[role] += 1
        worker = next(worker for worker in workers if worker.address == key)
        return worker, min(num_tokens, matched[key] * worker.hello.page_size)

    def _candidate(self, worker: Worker, matched_pages: int) -> Candidate:
        load = worker.load
        return Candidate(
            key=worker.address,
            role=worker.hello.role,
            num_live=worker.num_live,
            live_tokens=worker.live_tokens,
            waiting_tokens=load.waiting_tokens,
            num_running=load.num_running,
            free_pages=load.free_pages + load.evictable_pages,
            total_pages=worker.hello.total_pages,
            page_size=worker.hello.page_size,
            matched_pages=matched_pages,
            is_overloaded=self.hints.is_overloaded(worker.address),
        )
