"""Whether a waiting request may start, and what it then holds. Knows no budget of tokens.

A request starts with all pages of its tokens, so a prefill that has begun never waits for pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.req import Req
from kvcache.prefix_cache import LoadedBack, Match, PrefixCache


class Admission:
    def __init__(self, cache: PrefixCache, page_size: int) -> None:
        self._cache = cache
        self._page_size = page_size

    def admit(self, req: Req, num_running: int, prefilling: Iterable[Req]) -> str:
        """Give `req` its cached prefix and pages. Returns "admitted"; "later" where another request
        is computing the very page this one needs next (it will find it cached); "full" where pages
        are missing, and then nothing has changed."""
        token_ids = req.token_ids
        # The last token is always computed: its logits are needed. Prompt scores need all.
        match = self._cache.match([] if req.scores_prompt else token_ids[:-1])
        if not req.scores_prompt and self._is_being_computed(req, match.num_tokens, prefilling):
            return "later"
        return "admitted" if self._take(req, match, len(token_ids), num_running) else "full"

    def reserve(self, req: Req, num_running: int) -> bool:
        """Give `req`, whose KV will come from elsewhere, its cached prefix and pages for the rest
        and for the next token. False where pages are missing, and then nothing has changed."""
        match = self._cache.match(req.token_ids)
        return self._take(req, match, len(req.token_ids) + 1, num_running)

    def _take(self, req: Req, match: Match, num_tokens: int, num_running: int) -> bool:
        num_pages = -(-num_tokens // self._page_size)
        num_on_device = match.num_tokens
        self._cache.lock(match.node)
        pages = None
        # Each running request may soon need one more page: start none that would be retracted.
        num_needed = num_pages - len(match.pages) + num_running
        if num_running == 0 or num_needed <= self._cache.obtainable_pages:
            match = self._load_back(match, num_tokens, num_running)
            last_page = match.pages[-1] if match.pages else None
            pages = self._cache.alloc(num_pages - len(match.pages), last_page)
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

    def _is_being_computed(self, req: Req, start: int, prefilling: Iterable[Req]) -> bool:
        end = start + self._page_size
        if end >= len(req.token_ids):
            return False
        page = req.token_ids[start:end]
        return any(
            other.num_tree < end <= len(other.token_ids)
            and other.token_ids[start:end] == page
            and other.token_ids[:start] == req.token_ids[:start]
            for other in prefilling
        )
