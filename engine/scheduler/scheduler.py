"""One worker's scheduler: submit and abort -> plan() -> (the ranks execute) -> update().

It alone decides; it owns the waiting queue, the running set and, through the prefix cache, all
pages. It knows no tensors, no text and no sockets. `update` takes what the step found and yields
what the clients are told.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.plan import Extend, Sampled, Start, StepPlan, StepResult
from engine.req import Req
from engine.scheduler.admission import Admission
from engine.scheduler.prefill import share_budget
from engine.scheduler.running import RunningSet
from engine.scheduler.waiting import WaitingQueue
from engine.types import FinishReason, Load, Request, TokenOut
from kvcache.prefix_cache import PrefixCache


class Scheduler:
    """Continuous batching with chunked prefill: each step decodes every running request and spends
    `chunk_size` tokens on prompts."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        page_size: int,
        chunk_size: int,
        max_running: int,
        context_length: int,
        vocab_size: int,
    ) -> None:
        self._cache = cache
        self._page_size = page_size
        self._chunk_size = chunk_size
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._waiting = WaitingQueue()
        self._running = RunningSet(cache, page_size, max_running)
        self._admission = Admission(cache, page_size)
        self._reqs: dict[str, Req] = {}
        self._in_step: list[Req] = []  # in the order of the plan's extends
        self._num_submitted = 0
        self._step = 0
        self.counts: Counter[str] = Counter()  # events, cumulative

    # -- what the clients ask

    def submit(self, request: Request, output_ids: list[int]) -> list[TokenOut]:
        """Queue a request. A request that cannot be served ends here, alone."""
        req = Req.new(request, list(output_ids), self._num_submitted)
        self._num_submitted += 1
        error = self._refusal(req)
        if error:
            self.counts["refused"] += 1
            return [TokenOut(rid=req.rid, index=0, finish_reason="error", error=error)]
        reason = self._finish_reason(req) if output_ids else None
        if reason is not None:  # a replay of an answer that was complete
            return [TokenOut(rid=req.rid, index=req.num_emitted, finish_reason=reason)]
        self._reqs[req.rid] = req
        self._waiting.push(req)
        return []

    def abort(self, rid: str) -> list[TokenOut]:
        """Stop a request at once, waiting or running; between steps only."""
        if rid not in self._reqs:
            return []
        self.counts["aborted"] += 1
        return [self._end(self._reqs[rid], "abort")]

    def abort_all(self) -> list[TokenOut]:
        return [out for rid in list(self._reqs) for out in self.abort(rid)]

    def _refusal(self, req: Req) -> str:
        if req.rid in self._reqs:
            return f"request id {req.rid!r} is in use"
        if not req.request.token_ids:
            return "the prompt is empty: at least one token is needed"
        room = self._context_length - req.num_prompt
        if req.sampling.max_tokens < 0 or req.sampling.max_tokens > room:
            return (
                f"{req.num_prompt} prompt tokens and max_tokens {req.sampling.max_tokens} exceed "
                f"the context length of {self._context_length}"
            )
        bad = [t for t in req.token_ids if not 0 <= t < self._vocab_size]
        bad += [t for t in req.sampling.logit_bias if not 0 <= t < self._vocab_size]
        if bad:
            return f"token id {bad[0]} is outside the vocabulary of {self._vocab_size}"
        return ""

    # -- a step

    def plan(self) -> StepPlan | None:
        """The next step; None where there is nothing to do."""
        extends, retracted = self._plan_decodes()
        starts = [] if retracted else self._admit()
        prefilling = self._prefilling()
        shares = share_budget([req.num_to_compute for req in prefilling], self._chunk_size)
        extends += [
            self._extend(r, share) for r, share in zip(prefilling, shares, strict=True) if share
        ]
        if not extends:
            if self._waiting and not retracted:
                raise RuntimeError(f"a waiting request fits an empty pool never: {self.load}")
            return None
        self._step += 1
        finished, self._running.finished_indices = self._running.finished_indices, []
        return StepPlan(step=self._step, finished=finished, starts=starts, extends=extends)

    def _plan_decodes(self) -> tuple[list[Extend], bool]:
        """One token for each decoding request, oldest first, and whether pages ran out for some."""
        self._in_step = []
        extends: list[Extend] = []
        retracted: list[Req] = []
        for req in [req for req in self._running if req.is_decoding]:
            if req.req_index < 0:  # just retracted for an older one
                continue
            retracted += self._running.ensure_page(req)
            if req.req_index >= 0:
                extends.append(self._extend(req, 1))
        for req in retracted:
            self._waiting.push(req)
        self.counts["retracted"] += len(retracted)
        return extends, bool(retracted)

    def _prefilling(self) -> list[Req]:
        """Running requests that do not decode in this step: prefills, and what has just started."""
        decoding = {id(req) for req in self._in_step}
        return [req for req in self._running if id(req) not in decoding]

    def _admit(self) -> list[Start]:
        """Start waiting requests while this step has tokens for them."""
        starts: list[Start] = []
        for req in self._waiting:
            prefilling = self._prefilling()
            shares = share_budget([r.num_to_compute for r in prefilling], self._chunk_size)
            spare = self._chunk_size - sum(shares[1:]) - min(sum(shares[:1]), self._chunk_size // 2)
            if self._running.is_full or spare <= 0:
                break
            verdict = self._admission.admit(req, len(self._running), prefilling)
            if verdict == "full":
                break  # nothing younger overtakes it: it would wait for ever
            if verdict == "later":
                continue
            self._start(req, starts)
        return starts

    def _start(self, req: Req, starts: list[Start]) -> None:
        self._waiting.remove(req)
        self._running.add(req)
        self.counts["admitted"] += 1
        self.counts["cached_tokens"] += req.num_computed
        starts.append(
            Start(
                req_index=req.req_index,
                sampling=req.sampling,
                prompt_ids=req.request.token_ids,
                output_ids=req.token_ids[req.num_prompt :],
            )
        )

    def _extend(self, req: Req, num_tokens: int) -> Extend:
        start, end = req.num_computed, req.num_computed + num_tokens
        page_start, req.num_pages_known = req.num_pages_known, len(req.pages)
        self._in_step.append(req)
        return Extend(
            req_index=req.req_index,
            token_ids=req.token_ids[start:end],
            start=start,
            page_start=page_start,
            pages=req.pages[page_start:],
            samples=end == len(req.token_ids) and req.sampling.max_tokens > 0,
            targets=req.request.token_ids[start + 1 : end + 1] if req.scores_prompt else [],
        )

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenOut]:
        """Fold a step's result in; one TokenOut for each request that got a token or ended."""
        outs: list[TokenOut] = []
        for req, extend, sampled in zip(self._in_step, plan.extends, result.sampled, strict=True):
            was_decoding = req.is_decoding
            self.counts["decode_tokens" if was_decoding else "prefill_tokens"] += len(
                extend.token_ids
            )
            req.num_computed += len(extend.token_ids)
            if req.scores_prompt:
                req.prompt_logprobs += [] if req.prompt_logprobs else [None]
                req.prompt_logprobs += sampled.target_logprobs
            if req.num_to_compute == 0:
                if not was_decoding:
                    self._running.keep_in_cache(req)  # others with this prompt find it at once
                outs.append(self._token_out(req, sampled))
        self._in_step = []
        return outs

    def _token_out(self, req: Req, sampled: Sampled) -> TokenOut:
        prompt_logprobs = req.prompt_logprobs if req.scores_prompt else []
        if sampled.token_id is None:
            return self._end(req, "length", prompt_logprobs=prompt_logprobs)
        req.token_ids.append(sampled.token_id)
        reason = self._finish_reason(req)
        fields = {
            "ids": [sampled.token_id],
            "logprobs": [sampled.logprob] if sampled.logprob is not None else [],
            "prompt_logprobs": prompt_logprobs,
        }
        if reason is not None:
            return self._end(req, reason, stop_token=reason == "stop", **fields)
        out = self._out(req, **fields)
        req.num_emitted = req.num_output
        return out

    def _finish_reason(self, req: Req) -> FinishReason | None:
        sampling = req.sampling
        if req.num_output > sampling.min_tokens and req.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        at_limit = req.num_output >= sampling.max_tokens
        return "length" if at_limit or len(req.token_ids) >= self._context_length else None

    def _out(self, req: Req, **fields: Any) -> TokenOut:
        return TokenOut(
            rid=req.rid, index=req.num_emitted, cached_tokens=req.num_cached or 0, **fields
        )

    def _end(self, req: Req, reason: FinishReason, **fields: Any) -> TokenOut:
        """The one way out of the scheduler, whatever the reason."""
        del self._reqs[req.rid]
        if req.req_index >= 0:
            self._running.release(req)
        else:
            self._waiting.remove(req)
        return self._out(req, finish_reason=reason, **fields)

    def fail_step(self, error: str) -> list[TokenOut]:
        """The step could not be executed: its requests end with `error`, all others go on."""
        failed, self._in_step = self._in_step, []
        self.counts["failed"] += len(failed)
        return [self._end(req, "error", error=error) for req in failed]

    # -- what others may know

    @property
    def is_idle(self) -> bool:
        return not self._reqs

    @property
    def used_pages_by_lane(self) -> list[int]:
        """Pages held or cached, by the rank that owns them."""
        return self._cache.used_pages_by_lane()

    @property
    def load(self) -> Load:
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            free_pages=self._cache.free_pages,
            evictable_pages=self._cache.evictable_pages,
            locked_pages=self._cache.locked_pages,
        )
