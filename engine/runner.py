"""A rank's hands: executes a step plan and reports. Owns the sampling states that plans fill;
decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from engine.attention.base import Attention
from engine.batch import BatchArrays, ForwardBatch
from engine.decode_graphs import DecodeGraphs
from engine.model.base import Model
from engine.page_tables import PageTables
from engine.parallel.mesh import Mesh
from engine.parallel.share import Share
from engine.plan import Extend, Sampled, StepPlan, StepResult
from engine.sampler import LogprobRequest, SamplingState, sample, score
from engine.staging import Staging
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
        tables: PageTables,
        staging: Staging,
        page_size: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._begin_attention = begin_attention
        self._mesh = mesh
        self._deal_mode = deal_mode
        self._tables = tables
        self._staging = staging
        self._page_size = page_size
        self._graphs = graphs
        self._states: dict[int, SamplingState] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the forward raises; the state stays usable then."""
        t0 = time.perf_counter()
        arrays = self._prepare(plan)
        t1 = time.perf_counter()
        rows = self._forward(plan.extends, arrays)
        t2 = time.perf_counter()
        sampled = self._sample(plan.extends, rows) if self._mesh.rank == 0 else []
        t3 = time.perf_counter()
        seconds = {"prepare": t1 - t0, "forward": t2 - t1, "sample": t3 - t2}
        return StepResult(step=plan.step, sampled=sampled, seconds=seconds)

    def _prepare(self, plan: StepPlan) -> BatchArrays:
        for req_index in plan.finished:
            self._states.pop(req_index, None)
        if self._mesh.rank == 0:
            for start in plan.starts:
                self._states[start.req_index] = SamplingState.new(
                    start.sampling,
                    start.prompt_ids,
                    start.output_ids,
                    self._model.vocab_size,
                    self._mesh.device,
                )
        self._tables.update(plan, self._staging)
        return BatchArrays.of(plan.extends, self._tables, self._page_size)

    def _forward(self, extends: list[Extend], arrays: BatchArrays) -> torch.Tensor:
        """Hidden states of the wanted tokens, in their order."""
        wanted = _wanted_tokens(extends)
        if self._graphs is not None and self._graphs.takes(arrays):
            return self._pick(self._graphs.run(arrays), wanted)
        batch = arrays.send(self._tables, self._staging, self._page_size)
        share = Share(batch, self._mesh, self._deal_mode)
        attention = self._begin_attention(batch, share)
        hidden = self._model.forward(share.token_ids, share.positions, attention)
        if self._mesh.size > 1:
            return share.pick(hidden, wanted) if wanted else hidden
        return self._pick(hidden, wanted)

    def _pick(self, hidden: torch.Tensor, wanted: list[int]) -> torch.Tensor:
        if wanted == list(range(len(wanted))):
            return hidden[: len(wanted)]
        (tokens,) = self._staging.send(np.array(wanted, dtype=np.int64))
        return hidden[tokens]

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
