"""The running set: who holds a req_index and pages, and how they are given back.

Retraction keeps what was computed in the prefix cache, so that a retracted request resumes cheaply.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.req import Req
from kvcache.prefix_cache import PrefixCache


class RunningSet:
    """`looks_ahead`: a request that decodes is given the page of the token after its next, too,
    where there is one to be had."""

    def __init__(self, cache: PrefixCache, max_running: int, looks_ahead: bool) -> None:
        self._cache = cache
        self._looks_ahead = looks_ahead
        self._page_size = cache.page_size
        self._free_indices = list(range(max_running - 1, -1, -1))
        self._reqs: list[Req] = []  # by seniority
        self._finished_indices: list[int] = []

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def is_full(self) -> bool:
        return not self._free_indices

    def __iter__(self) -> Iterator[Req]:
        """By seniority."""
        return iter(self._reqs)

    def add(self, req: Req) -> None:
        req.req_index = self._free_indices.pop()
        self._reqs.append(req)
        self._reqs.sort(key=lambda r: r.seniority)

    def ensure_page(self, req: Req) -> list[Req]:
        """Make room for the next token of `req`. Returns the requests retracted for it, the most
        junior first; the last of them may be `req` itself."""
        retracted: list[Req] = []
        while len(req.pages) * self._page_size < len(req.token_ids):
            pages = self._cache.device.alloc(1, req.pages[-1] if req.pages else None)
            if pages is not None:
                req.pages += pages
                continue
            # A transfer may be writing or reading the pages of the others.
            victim = next(r for r in reversed(self._reqs) if not (r.incoming or r.outgoing))
            self.remove(victim)
            self.give_back(victim)
            retracted.append(victim)
            if victim is req:
                break
        if self._looks_ahead and not retracted and len(req.token_ids) + 1 < req.most_tokens:
            self._take_page_ahead(req)
        return retracted

    def _take_page_ahead(self, req: Req) -> None:
        if len(req.pages) * self._page_size == len(req.token_ids):
            req.pages += self._cache.device.alloc(1, req.pages[-1]) or []

    def keep_prompt(self, req: Req) -> None:
        """All of its prompt is computed: hand it to the prefix cache, for the time that the request
        asks for where it does."""
        self.keep_in_cache(req)
        node = req.node
        if node is None or not req.request.pin_s:
            return
        if req.num_tree > req.num_prompt:  # output too, after a replay or a retraction
            node = self._cache.match(req.request.token_ids).node
        self._cache.pin(node, req.request.pin_s)

    def keep_in_cache(self, req: Req) -> None:
        """Hand the full pages computed so far to the prefix cache; `req` keeps using them."""
        num_full = req.num_computed // self._page_size * self._page_size
        if num_full <= req.num_tree:
            return
        first, last = req.num_tree // self._page_size, num_full // self._page_size
        span = req.token_ids[req.num_tree : num_full]
        inserted = self._cache.insert(span, req.pages[first:last], after=req.node)
        self._cache.lock(inserted.node)
        if req.node is not None:
            self._cache.unlock(req.node)
        req.node = inserted.node
        req.num_tree = num_full
        if req.outgoing is not None:
            req.spare += inserted.duplicates
        elif inserted.duplicates:
            self._cache.device.free(inserted.duplicates)
        for i, page in enumerate(inserted.pages, first):
            if req.pages[i] != page:  # cached already, in other pages: the tree's win
                req.num_pages_known = min(req.num_pages_known, i)
                req.pages[i] = page

    def remove(self, req: Req) -> None:
        """Take `req` out of the running set; it keeps its pages."""
        self._reqs.remove(req)
        self._free_indices.append(req.req_index)
        self._finished_indices.append(req.req_index)
        req.req_index = -1

    def take_finished(self) -> list[int]:
        """The req_indices that have come free since the last call, for the ranks to be told."""
        finished, self._finished_indices = self._finished_indices, []
        return finished

    def give_back(self, req: Req) -> None:
        """The pages of one that was removed: what is computed stays cached, the rest is freed."""
        self.keep_in_cache(req)
        self._cache.device.free(self.take_own(req) + req.spare)
        req.spare = []

    def take_own(self, req: Req) -> list[int]:
        """The pages of one that was removed that are its own: they become the caller's."""
        own = req.pages[req.num_tree // self._page_size :]
        if req.node is not None:
            self._cache.unlock(req.node)
        req.node, req.pages = None, []
        req.num_tree = req.num_computed = req.num_pages_known = 0
        if req.num_output == 0:
            req.prompt_logprobs = []
        return own
