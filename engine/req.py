"""A request inside a worker: the one mutable value, owned by the worker's scheduler.

Who owns which part of the request's KV (positions in tokens):

    [0, num_tree)                 the prefix cache's pages, locked through `node`
    [num_tree, num_computed)      written, pages of the request's own
    [num_computed, len(pages)*s)  allocated, not written yet (s = page_size)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.handoff.room import Incoming, Outgoing
from engine.types import Request, SamplingParams, TokenLogprob, TokenOut
from kvcache.prefix_cache import Node


@dataclass(slots=True, eq=False)
class Req:
    request: Request
    arrival: int  # order of submission; kept over retractions
    token_ids: list[int]  # prompt, then output
    num_emitted: int  # output tokens the client has already
    node: Node | None = None
    req_index: int = -1  # place in the running set; -1 while waiting
    pages: list[int] = field(default_factory=list)
    num_pages_known: int = 0  # pages[:this] are in the ranks' page tables
    num_tree: int = 0
    num_computed: int = 0
    num_cached: int | None = None  # prompt tokens found in the cache at the first admission
    num_cached_host: int = 0  # those of them that were loaded back from the host tier
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    attempt: int = 0  # which of the front end's submissions this is
    outgoing: Outgoing | None = None  # its KV is pushed to a decode worker
    incoming: Incoming | None = None  # its KV comes from a prefill group, and is not there yet
    # Own pages out of use that a push may still read
    spare: list[int] = field(default_factory=list)

    @classmethod
    def new(cls, request: Request, output_ids: list[int], arrival: int) -> Req:
        return cls(request, arrival, request.token_ids + output_ids, len(output_ids))

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def seniority(self) -> tuple[int, int]:
        """Smaller is served earlier and retracted later."""
        return (-self.request.priority, self.arrival)

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def most_tokens(self) -> int:
        """Prompt and output, once it has all that was asked for."""
        return self.num_prompt + self.sampling.max_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is missing; 1 in steady decode."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_output > 0 and self.num_to_compute == 1 and self.incoming is None

    @property
    def scores_prompt(self) -> bool:
        """Its prompt's log-probabilities are still owed: every prompt position must be computed."""
        return self.sampling.prompt_logprobs is not None and self.num_emitted == 0

    def out(self, **fields: Any) -> TokenOut:
        """What its client is told next."""
        return TokenOut(
            rid=self.rid,
            index=self.num_emitted,
            attempt=self.attempt,
            cached_tokens=self.num_cached or 0,
            cached_host_tokens=self.num_cached_host,
            **fields,
        )
