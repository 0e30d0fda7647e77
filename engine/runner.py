"""A rank's hands: executes a step plan and reports. Owns the page tables and sampling states that
plans fill; decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.attention.base import Attention
from engine.batch import ForwardBatch
from engine.model.base import Model
from engine.parallel.mesh import Mesh
from engine.parallel.share import Share
from engine.plan import Extend, Sampled, StepPlan, StepResult
from engine.sampler import LogprobRequest, SamplingState, sample, score
from engine.types import TokenLogprob

_SCORE_ROWS = 64  # logits rows held at once for prompt log-probabilities


class Runner:
    """One rank's part of each step. All ranks of a group execute the same plans; rank 0 samples."""

    def __init__(
        self,
        model: Model,
        begin_attention: Callable[[ForwardBatch, Share], Attention],
        mesh: Mesh,
        deal_mode: str,
        *,
        page_size: int,
        max_running: int,
        max_pages: int,
    ) -> None:
        self._model = model
        self._begin_attention = begin_attention
        self._mesh = mesh
        self._deal_mode = deal_mode
        self._device = device = mesh.device
        self._page_size = page_size
        self._page_table = torch.zeros(max_running, max_pages, dtype=torch.int64, device=device)
        self._states: dict[int, SamplingState] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the forward raises; the state stays usable then."""
        t0 = time.perf_counter()
        batch = self._prepare(plan)
        t1 = time.perf_counter()
        share = Share(batch, self._mesh, self._deal_mode)
        attention = self._begin_attention(batch, share)
        hidden = self._model.forward(share.token_ids, share.positions, attention)
        rows = share.pick(hidden, wanted) if (wanted := _wanted_tokens(plan.extends)) else hidden
        t2 = time.perf_counter()
        sampled = self._sample(plan.extends, rows) if self._mesh.rank == 0 else []
        t3 = time.perf_counter()
        seconds = {"prepare": t1 - t0, "forward": t2 - t1, "sample": t3 - t2}
        return StepResult(step=plan.step, sampled=sampled, seconds=seconds)

    def _prepare(self, plan: StepPlan) -> ForwardBatch:
        for req_index in plan.finished:
            self._states.pop(req_index, None)
        for start in plan.starts:
            self._page_table[start.req_index] = 0
            if self._mesh.rank != 0:
                continue
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

    def _sample(self, extends: list[Extend], rows: torch.Tensor) -> list[Sampled]:
        """`rows` [S, hidden_size]: hidden states of the wanted tokens, in their order."""
        sampling = [extend for extend in extends if extend.samples]
        tokens: dict[int, int] = {}  # by req_index
        logprobs: dict[int, TokenLogprob] = {}
        if sampling:
            logits = self._model.logits(rows[: len(sampling)])
            states = [self._states[extend.req_index] for extend in sampling]
            found = sample(logits, states)
            tokens = {e.req_index: token for e, token in zip(sampling, found, strict=True)}
            wanted = {
                e.req_index: LogprobRequest(row, token, state.params.logprobs)
                for row, (e, token, state) in enumerate(zip(sampling, found, states, strict=True))
                if state.params.logprobs is not None
            }
            logprobs = dict(zip(wanted, score(logits, list(wanted.values())), strict=True))
            for state, token in zip(states, found, strict=True):
                state.append(token)
        sampled, at = [], len(sampling)
        for extend in extends:
            targets = self._score_targets(extend, rows[at : at + len(extend.targets)])
            at += len(extend.targets)
            sampled.append(
                Sampled(
                    req_index=extend.req_index,
                    token_id=tokens.get(extend.req_index),
                    logprob=logprobs.get(extend.req_index),
                    target_logprobs=targets,
                )
            )
        return sampled

    def _score_targets(self, extend: Extend, rows: torch.Tensor) -> list[TokenLogprob]:
        num_top = self._states[extend.req_index].params.prompt_logprobs or 0
        scored: list[TokenLogprob] = []
        for at in range(0, len(rows), _SCORE_ROWS):
            targets = extend.targets[at : at + _SCORE_ROWS]
            logits = self._model.logits(rows[at : at + _SCORE_ROWS])
            scored += score(logits, [LogprobRequest(i, t, num_top) for i, t in enumerate(targets)])
        return scored


def _wanted_tokens(extends: list[Extend]) -> list[int]:
    """The batch tokens whose logits the step needs: the last of each extend that samples, then
    those that score targets."""
    lasts: list[int] = []
    scoring: list[int] = []
    begin = 0
    for extend in extends:
        end = begin + len(extend.token_ids)
        lasts += [end - 1] if extend.samples else []
        scoring += range(begin, begin + len(extend.targets))
        begin = end
    return lasts + scoring
