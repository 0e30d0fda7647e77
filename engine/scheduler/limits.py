"""What a request may ask of this model, and when its answer is complete. Knows no pages: a request
within these limits fits an empty pool."""

from __future__ import annotations

from dataclasses import dataclass

from engine.req import Req
from engine.types import FinishReason


@dataclass(frozen=True, slots=True)
class Limits:
    context_length: int  # tokens of prompt and output together
    vocab_size: int

    def refusal(self, req: Req) -> str:
        """Why it cannot be served; empty where it can."""
        if not req.request.token_ids:
            return "the prompt is empty: at least one token is needed"
        room = self.context_length - req.num_prompt
        if req.sampling.max_tokens < 0 or req.sampling.max_tokens > room:
            return (
                f"{req.num_prompt} prompt tokens and max_tokens {req.sampling.max_tokens} exceed "
                f"the context length of {self.context_length}"
            )
        if req.incoming is not None and len(req.token_ids) >= self.context_length:
            return (
                f"{len(req.token_ids)} tokens fill the context length of {self.context_length}: "
                "there is nothing to decode"
            )
        bad = [t for t in req.token_ids if not 0 <= t < self.vocab_size]
        bad += [t for t in req.sampling.logit_bias if not 0 <= t < self.vocab_size]
        if bad:
            return f"token id {bad[0]} is outside the vocabulary of {self.vocab_size}"
        return ""

    def finish_reason(self, req: Req) -> FinishReason | None:
        """Of one that has output; None where more is to come."""
        sampling = req.sampling
        if req.num_output > sampling.min_tokens and req.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        at_limit = req.num_output >= sampling.max_tokens
        return "length" if at_limit or len(req.token_ids) >= self.context_length else None
