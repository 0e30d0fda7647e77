"""The waiting queue: by priority, then by arrival. Knows nothing of pages."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.req import Req


class WaitingQueue:
    """A retracted request keeps its arrival and so returns to its old place."""

    def __init__(self) -> None:
        self._reqs: list[Req] = []  # by seniority
        self.num_tokens = 0  # to compute, prefixes not yet subtracted

    def push(self, req: Req) -> None:
        insort(self._reqs, req, key=lambda r: r.seniority)
        self.num_tokens += len(req.token_ids)

    def remove(self, req: Req) -> None:
        del self._reqs[bisect_left(self._reqs, req.seniority, key=lambda r: r.seniority)]
        self.num_tokens -= len(req.token_ids)

    def __iter__(self) -> Iterator[Req]:
        """In order, over a snapshot: the caller may remove what it visits."""
        return iter(tuple(self._reqs))

    def __len__(self) -> int:
        return len(self._reqs)
