"""Which waiting requests start with a step, and what they then hold.

A request starts with all pages of its tokens, so a prefill that has begun never waits for pages.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from engine.req import Req
from engine.scheduler.prefill import spare_budget
from engine.scheduler.requests import Requests
from kvcache.prefix_cache import LoadedBack, Match, PrefixCache


class Admission:
    """`chunk_size`: a step's tokens for prefills."""

    def __init__(self, cache: PrefixCache, requests: Requests, chunk_size: int) -> None:
        self._cache = cache
        self._page_size = cache.page_size
        self._requests = requests
        self._chunk_size = chunk_size

    def admit(self, prefilling: Sequence[Req]) -> list[Req]:
        """Start waiting requests, each with its cached prefix and pages, while there is room for
        them; those started. `prefilling`: who shares the step's tokens already, by seniority."""
        prefilling, admitted = list(prefilling), []
        for req in self._requests.waiting:
            if self._requests.running.is_full:
                break
            if req.incoming is not None:  # its KV comes from elsewhere, and costs no tokens here
                match, num_tokens = self._cache.match(req.token_ids), len(req.token_ids) + 1
            else:
                if spare_budget([r.num_to_compute for r in prefilling], self._chunk_size) <= 0:
                    break
                # The last token is always computed: its logits are needed. Prompt scores need all.
                match = self._cache.match([] if req.scores_prompt else req.token_ids[:-1])
                num_tokens = len(req.token_ids)
                if _is_being_computed(req, match, prefilling, self._page_size):
                    continue  # it will find that page cached
            if not self._take(req, match, num_tokens):
                break  # nothing younger overtakes it: it would wait for ever
            self._requests.start(req)
            admitted.append(req)
            if req.incoming is None:
                insort(prefilling, req, key=lambda r: r.seniority)
        return admitted

    def _take(self, req: Req, match: Match, num_tokens: int) -> bool:
        """Give `req` what is cached and own pages for the rest of `num_tokens`. False where pages
        are missing, and then nothing has changed."""
        num_running = len(self._requests.running)
        num_pages = -(-num_tokens // self._page_size)
        num_on_device = match.num_tokens
        self._cache.lock(match.node)
        pages = None
        # Each running request may soon need one more page: start none that would be retracted.
        num_needed = num_pages - len(match.pages) + num_running
        if num_running == 0 or num_needed <= self._cache.device.obtainable_pages:
            match = self._load_back(match, num_tokens, num_running)
            last_page = match.pages[-1] if match.pages else None
            pages = self._cache.device.alloc(num_pages - len(match.pages), last_page)
        if pages is None:
            self._cache.unlock(match.node)
            return False
        self._cache.use(match)
        req.node = match.node
        req.pages = match.pages + pages
        req.num_pages_known = 0
        req.num_tree = req.num_computed = match.num_tokens
        if req.num_cached is None:
            req.num_cached = min(match.num_tokens, req.num_prompt)
            req.num_cached_host = req.num_cached - min(num_on_device, req.num_prompt)
        return True

    def _load_back(self, match: Match, num_tokens: int, num_running: int) -> Match:
        """What to start from: `match`, or with what the host has beyond it. The lock on `match`
        moves along. Only for a request that finds room, or it would ask in every step."""
        own = num_tokens - match.num_tokens - match.num_host_tokens
        mem_quota = self._cache.mem_quota(own + num_running * self._page_size)
        loaded = self._cache.load_back(match, mem_quota=mem_quota)
        if not isinstance(loaded, LoadedBack):
            return match
        self._cache.lock(loaded.match.node)
        self._cache.unlock(match.node)
        return loaded.match


def _is_being_computed(req: Req, match: Match, others: Sequence[Req], page_size: int) -> bool:
    """One of `others` is computing the very page that `req` needs next after `match`."""
    start = match.num_tokens
    end = start + page_size
    if req.scores_prompt or end >= len(req.token_ids):
        return False
    page = req.token_ids[start:end]
    return any(
        other.num_tree < end <= len(other.token_ids)
        and other.token_ids[start:end] == page
        and other.token_ids[:start] == req.token_ids[:start]
        for other in others
    )
