"""A rank's hands: executes a step plan and reports. Owns the page tables and sampling states that
plans fill; decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.attention.base import Attention
from engine.batch import ForwardBatch
from engine.model.base import Model
from engine.plan import Extend, Sampled, StepPlan, StepResult
from engine.sampler import LogprobRequest, SamplingState, sample, score
from engine.types import TokenLogprob

_SCORE_ROWS = 64  # logits rows held at once for prompt log-probabilities


class Runner:
    def __init__(
        self,
        model: Model,
        begin_attention: Callable[[ForwardBatch], Attention],
        *,
        device: torch.device,
        page_size: int,
        max_running: int,
        max_pages: int,
    ) -> None:
        self._model = model
        self._begin_attention = begin_attention
        self._device = device
        self._page_size = page_size
        self._page_table = torch.zeros(max_running, max_pages, dtype=torch.int64, device=device)
        self._states: dict[int, SamplingState] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the forward raises; the state stays usable then."""
        t0 = time.perf_counter()
        batch = self._prepare(plan)
        t1 = time.perf_counter()
        hidden = self._model.forward(batch, self._begin_attention(batch))
        t2 = time.perf_counter()
        sampled = self._sample(plan.extends, hidden)
        t3 = time.perf_counter()
        seconds = {"prepare": t1 - t0, "forward": t2 - t1, "sample": t3 - t2}
        return StepResult(step=plan.step, sampled=sampled, seconds=seconds)

    def _prepare(self, plan: StepPlan) -> ForwardBatch:
        for req_index in plan.finished:
            self._states.pop(req_index, None)
        for start in plan.starts:
            self._page_table[start.req_index] = 0
            self._states[start.req_index] = SamplingState.new(
                start.sampling,
                start.prompt_ids,
                start.output_ids,
                self._model.vocab_size,
                self._device,
            )
        token_ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        for b, extend in enumerate(plan.extends):
            num_tokens = len(extend.token_ids)
            token_ids += extend.token_ids
            positions += range(extend.start, extend.start + num_tokens)
            owners += [b] * num_tokens
            if extend.pages:
                row = self._page_table[extend.req_index]
                pages = torch.tensor(extend.pages, device=self._device)
                row[extend.page_start : extend.page_start + len(extend.pages)] = pages
        return self._build_batch(plan.extends, token_ids, positions, owners)

    def _build_batch(
        self, extends: list[Extend], token_ids: list[int], positions: list[int], owners: list[int]
    ) -> ForwardBatch:
        longest = max(e.start + len(e.token_ids) for e in extends)
        num_pages = -(-longest // self._page_size)
        indices = torch.tensor([e.req_index for e in extends], device=self._device)
        page_table = self._page_table[indices, :num_pages]
        # [3, T] in one copy to the device
        host = torch.tensor([token_ids, positions, owners], dtype=torch.int64)
        tokens, where, owner = host.to(self._device, non_blocking=True)
        pages = page_table[owner, where // self._page_size]
        return ForwardBatch(
            token_ids=tokens,
            positions=where,
            out_loc=pages * self._page_size + where % self._page_size,
            page_table=page_table,
            starts=tuple(e.start for e in extends),
            lengths=tuple(len(e.token_ids) for e in extends),
        )

    def _sample(self, extends: list[Extend], hidden: torch.Tensor) -> list[Sampled]:
        """Tokens and log-probabilities for each extend; `hidden` is [T, hidden_size]."""
        lasts: list[int] = []
        end = 0
        for extend in extends:
            end += len(extend.token_ids)
            lasts.append(end - 1)
        sampling = [i for i, extend in enumerate(extends) if extend.samples]
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprob] = {}
        if sampling:
            logits = self._model.logits(hidden[[lasts[i] for i in sampling]])
            states = [self._states[extends[i].req_index] for i in sampling]
            tokens = dict(zip(sampling, sample(logits, states), strict=True))
            wanted = {
                i: LogprobRequest(row, tokens[i], state.params.logprobs)
                for row, (i, state) in enumerate(zip(sampling, states, strict=True))
                if state.params.logprobs is not None
            }
            logprobs = dict(zip(wanted, score(logits, list(wanted.values())), strict=True))
            for i, state in zip(sampling, states, strict=True):
                state.append(tokens[i])
        return [
            Sampled(
                req_index=extend.req_index,
                token_id=tokens.get(i),
                logprob=logprobs.get(i),
                target_logprobs=self._score_targets(extend, hidden, lasts[i]),
            )
            for i, extend in enumerate(extends)
        ]

    def _score_targets(self, extend: Extend, hidden: torch.Tensor, last: int) -> list[TokenLogprob]:
        if not extend.targets:
            return []
        num_top = self._states[extend.req_index].params.prompt_logprobs or 0
        first = last + 1 - len(extend.token_ids)
        scored: list[TokenLogprob] = []
        for at in range(0, len(extend.targets), _SCORE_ROWS):
            targets = extend.targets[at : at + _SCORE_ROWS]
            logits = self._model.logits(hidden[first + at : first + at + len(targets)])
            wanted = [LogprobRequest(row, t, num_top) for row, t in enumerate(targets)]
            scored += score(logits, wanted)
        return scored
