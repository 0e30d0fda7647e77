"""A rank's hands: executes a step plan and reports. Owns the sampling states that plans fill;
decides nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

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
from engine.run_ahead import BegunDecode, TokenRead
from engine.sampler import LogprobRequest, SamplingState, sample, score
from engine.staging import Staging
from engine.types import TokenLogprob
from kernels.sampling import Draw, draw

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
        runs_ahead: bool = False,
    ) -> None:
        """`runs_ahead`: begin decode steps before they are planned, where one rank computes them;
        see engine/run_ahead.py."""
        self._model = model
        self._begin_attention = begin_attention
        self._mesh = mesh
        self._deal_mode = deal_mode
        self._tables = tables
        self._staging = staging
        self._page_size = page_size
        self._graphs = graphs
        self.runs_ahead = runs_ahead
        self._ahead: BegunDecode | None = None  # the next step's, perhaps
        self.ahead_counts: Counter[str] = Counter()  # by outcome, since the start
        self._states: dict[int, SamplingState] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the forward raises; the state stays usable then."""
        t0 = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        self._update(plan)
        t1 = time.perf_counter()
        rows = ahead.rows_of(plan) if ahead is not None else None
        if ahead is not None:
            self.ahead_counts["dropped" if rows is None else "taken"] += 1
        if rows is None and self._is_plain_decode(plan.extends):
            ahead, rows = self._begin(plan.extends), list(range(len(plan.extends)))
        if ahead is not None and rows is not None:
            self._ahead = self._begin_next(plan.extends, ahead, rows)
            t2 = time.perf_counter()
            sampled = self._read(plan.extends, ahead, rows)
        else:
            hidden = self._forward(plan.extends)
            t2 = time.perf_counter()
            sampled = self._sample(plan.extends, hidden) if self._mesh.rank == 0 else []
        t3 = time.perf_counter()
        seconds = {"prepare": t1 - t0, "forward": t2 - t1, "sample": t3 - t2}
        return StepResult(step=plan.step, sampled=sampled, seconds=seconds)

    def settle(self) -> None:
        """Until the device has done all that steps gave it: a step that was dropped, failed or
        sampled nothing may go on there after `execute` has returned. Raises where the device does
        not work any more."""
        if self._mesh.device.type == "cuda":
            torch.cuda.current_stream(self._mesh.device).synchronize()

    def _update(self, plan: StepPlan) -> None:
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

    # -- decode steps that may run ahead

    def _is_plain_decode(self, extends: list[Extend]) -> bool:
        """Whether a step is nothing but decodes whose tokens the device can choose by itself."""
        return self.runs_ahead and all(
            len(e.token_ids) == 1
            and e.samples
            and not e.targets
            and self._states[e.req_index].is_plain
            for e in extends
        )

    def _begin(self, extends: list[Extend]) -> BegunDecode:
        arrays = BatchArrays.of(extends, self._tables, self._page_size)
        return self._decode(arrays, None, [self._states[e.req_index].draw() for e in extends])

    def _begin_next(
        self, extends: list[Extend], begun: BegunDecode, rows: list[int]
    ) -> BegunDecode | None:
        """The step after `begun`, whose `rows` are the extends; None where no such step can be, or
        where one of its requests has yet to be given the page that it needs."""
        going_on = [
            (row, e)
            for row, e in zip(rows, extends, strict=True)
            if not self._states[e.req_index].ends_with_next
        ]
        if not going_on:
            return None
        req_indices = np.array([e.req_index for _, e in going_on], dtype=np.int64)
        positions = np.array([e.start + 1 for _, e in going_on], dtype=np.int64)
        if not self._tables.have(req_indices, positions, self._page_size):
            return None
        arrays = BatchArrays(
            token_ids=np.zeros_like(positions),  # they are on the device
            positions=positions,
            out_loc=self._tables.locs(req_indices, positions, self._page_size),
            req_indices=req_indices,
            starts=tuple(positions.tolist()),
            lengths=(1,) * len(positions),
        )
        token_ids = self._pick(begun.tokens, [row for row, _ in going_on])
        draws = [self._states[e.req_index].draw(later=1) for _, e in going_on]
        return self._decode(arrays, token_ids, draws)

    def _decode(
        self, arrays: BatchArrays, token_ids: torch.Tensor | None, draws: list[Draw]
    ) -> BegunDecode:
        """`token_ids` [N] on the device, in place of the arrays'."""
        hidden = self._forward_all(arrays, token_ids)
        tokens = draw(self._model.logits(hidden), draws)
        return BegunDecode(
            tuple(arrays.req_indices.tolist()), arrays.starts, tokens, TokenRead(tokens)
        )

    def _read(self, extends: list[Extend], begun: BegunDecode, rows: list[int]) -> list[Sampled]:
        tokens = begun.read.wait()
        sampled = []
        for extend, row in zip(extends, rows, strict=True):
            self._states[extend.req_index].append(tokens[row])
            sampled.append(Sampled(req_index=extend.req_index, token_id=tokens[row]))
        return sampled

    # -- any step

    def _forward(self, extends: list[Extend]) -> torch.Tensor:
        """Hidden states of the wanted tokens, in their order."""
        arrays = BatchArrays.of(extends, self._tables, self._page_size)
        wanted = _wanted_tokens(extends)
        if self._mesh.size == 1:
            return self._pick(self._forward_all(arrays, None), wanted)
        batch = arrays.send(self._tables, self._staging, self._page_size)
        share = Share(batch, self._mesh, self._deal_mode)
        attention = self._begin_attention(batch, share)
        hidden = self._model.forward(share.token_ids, share.positions, attention)
        return share.pick(hidden, wanted) if wanted else hidden

    def _forward_all(self, arrays: BatchArrays, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of all tokens, where one rank computes them."""
        if self._graphs is not None and self._graphs.takes(arrays):
            return self._graphs.run(arrays, token_ids)
        batch = arrays.send(self._tables, self._staging, self._page_size)
        if token_ids is not None:
            batch = replace(batch, token_ids=token_ids)
        share = Share(batch, self._mesh, self._deal_mode)
        attention = self._begin_attention(batch, share)
        return self._model.forward(batch.token_ids, batch.positions, attention)

    def _pick(self, x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """x[rows]"""
        if rows == list(range(len(rows))):
            return x[: len(rows)]
        (index,) = self._staging.send(np.array(rows, dtype=np.int64))
        return x[index]

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
