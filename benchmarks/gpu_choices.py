"""What a model chose on its way to an answer, recorded on one device and taken over on the CPU.

A model with an indexer or experts chooses by comparing scores, and two scores may lie closer than
float32 rounds: then two right computations choose differently, and their tokens differ too. So the
CPU takes the other device's choices, holds each of them against scores of its own, and has to find
the same tokens. Knows engines, not what they are run for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
from torch.nn import functional

from engine.attention.paged import PagedForward, TopK
from engine.attention.tables import TableForward
from engine.batch import BatchArrays
from engine.model.moe import Gate
from engine.plan import StepPlan
from engine.runner import Runner

# By how much the least of the chosen may score less than the best of the others, as a share of the
# largest score. Float32's rounding, through some layers, makes some 1e-6; neighbouring scores lie
# some 1e-2 apart.
MOST_SHORTFALL: Final = 2e-5

Place = tuple[tuple[int, ...], int]  # a prompt, a position behind its beginning


@dataclass(slots=True)
class Choices:
    """Of every token that was computed; of what was computed twice, the last."""

    selected: dict[Place, torch.Tensor] = field(default_factory=dict)  # [num_layers, topk]
    experts: dict[Place, torch.Tensor] = field(default_factory=dict)  # [num_gates, top_k]


@dataclass(slots=True)
class Verdict:
    """How the choices that were taken over compare with the scores of who took them."""

    num_choices: int = 0
    num_ties: int = 0  # chosen otherwise than these scores say
    most_shortfall: float = 0.0

    @property
    def is_right(self) -> bool:
        """Every choice is these scores', but for ties that rounding decides."""
        return self.most_shortfall <= MOST_SHORTFALL

    def add(self, shortfall: float) -> None:
        self.num_choices += 1
        self.num_ties += shortfall > 0
        self.most_shortfall = max(self.most_shortfall, shortfall)

    def __str__(self) -> str:
        return (
            f"of {self.num_choices} choices {self.num_ties} were near ties decided otherwise, the "
            f"widest {self.most_shortfall:.1e} of the scores (at most {MOST_SHORTFALL:.0e})"
        )


class _Batches:
    """Which prompt and position each token of the batch at hand has."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, ...]] = {}  # by req_index
        self.places: list[Place] = []

    def start(self, plan: StepPlan) -> None:
        for start in plan.starts:
            self._prompts[start.req_index] = tuple(start.prompt_ids)

    def begin(self, arrays: BatchArrays) -> None:
        self.places = [
            (self._prompts[req_index], start + i)
            for req_index, start, length in zip(
                arrays.req_indices.tolist(), arrays.starts, arrays.lengths, strict=True
            )
            for i in range(length)
        ]


@contextmanager
def _following(batches: _Batches) -> Iterator[None]:
    update, forward = Runner._update, Runner._forward_all

    def updating(self: Runner, plan: StepPlan) -> None:
        batches.start(plan)
        update(self, plan)

    def forwarding(self: Runner, arrays: BatchArrays, token_ids: Any) -> torch.Tensor:
        batches.begin(arrays)
        return forward(self, arrays, token_ids)

    with (
        mock.patch.object(Runner, "_update", updating),
        mock.patch.object(Runner, "_forward_all", forwarding),
    ):
        yield


@contextmanager
def recording(
    device: torch.device, topk: int, top_k: int, *, num_layers: int, most_tokens: int
) -> Iterator[Choices]:
    """Of one engine that reads its KV by page tables, built, run and done with inside: what a layer
    chooses is copied on the device, so that recorded graphs copy it too, to what is freed behind.
    `topk` tokens and `top_k` experts, 0: there are none; `most_tokens` of a batch."""
    choices, batches, gates = Choices(), _Batches(), dict[int, int]()
    select, route = TableForward.select, Gate.__call__
    shape = (num_layers, most_tokens)
    rows = torch.zeros(*shape, max(topk, 1), dtype=torch.int32, device=device)
    experts = torch.zeros(*shape, max(top_k, 1), dtype=torch.int64, device=device)

    def selecting(self: TableForward, layer: int, *args: Any) -> Any:
        found = select(self, layer, *args)
        if found.decodes is not None:
            rows[layer, : len(found.decodes.rows)].copy_(found.decodes.rows)
        for begin, chosen in found.prefills.items():
            rows[layer, begin : begin + len(chosen.rows)].copy_(chosen.rows)
        return found

    def routing(self: Gate, logits: torch.Tensor) -> Any:
        ids, weights = route(self, logits)
        experts[gates.setdefault(id(self), len(gates)), : len(ids)].copy_(ids)
        return ids, weights

    with _following(batches):
        forward = Runner._forward_all

        def forwarding(self: Runner, arrays: BatchArrays, token_ids: Any) -> torch.Tensor:
            hidden = forward(self, arrays, token_ids)
            num = len(batches.places)
            chosen, routed = rows[:, :num].cpu(), experts[: len(gates), :num].cpu()
            requests = [b for b, length in enumerate(arrays.lengths) for _ in range(length)]
            for t, (place, b) in enumerate(zip(batches.places, requests, strict=True)):
                choices.experts[place] = routed[:, t].clone()
                if topk and place[1] >= topk:
                    pages = self._tables._host[arrays.req_indices[b]]
                    choices.selected[place] = _positions(chosen[:, t], pages, self._page_size)
            return hidden

        with (
            mock.patch.object(TableForward, "select", selecting),
            mock.patch.object(Gate, "__call__", routing),
            mock.patch.object(Runner, "_forward_all", forwarding),
        ):
            yield choices


def _positions(rows: torch.Tensor, pages: Any, page_size: int) -> torch.Tensor:
    """Rows of one rank's cache [num_layers, topk] -> the positions that they hold, ascending; -1
    for a row of somebody else's."""
    at = torch.full((int(max(pages.max(), rows.max() // page_size)) + 1,), -1, dtype=torch.int64)
    used = torch.from_numpy(pages[: int((pages > 0).sum())]).long()
    at[used] = torch.arange(len(used))
    page = at[rows.long() // page_size]
    return torch.where(page < 0, -1, page * page_size + rows % page_size).sort(-1).values


@contextmanager
def taking_over(choices: Choices) -> Iterator[Verdict]:
    """Of one engine on the CPU, built and run inside on the same prompts."""
    verdict, batches, gates = Verdict(), _Batches(), dict[int, int]()

    def selecting(
        self: PagedForward, layer: int, q: torch.Tensor, weights: torch.Tensor, topk: int
    ) -> TopK:
        keys = self._pool.index_keys(layer)

        def positions_of(token: int, rows: torch.Tensor) -> torch.Tensor:
            """[topk] of a batch token that sees what lies in `rows`; -1 behind them."""
            if len(rows) <= topk:
                return functional.pad(torch.arange(len(rows)), (0, topk - len(rows)), value=-1)
            taken = choices.selected[batches.places[token]][layer]
            products = (q[token].double() @ keys[rows].double().t()).relu()
            verdict.add(shortfall(weights[token].double() @ products, taken))
            return taken

        rows = counts = None
        if (decodes := self._view.decodes) is not None:
            tokens = range(len(decodes.contexts)) if decodes.tokens is None else decodes.tokens
            chosen = torch.stack(
                [
                    positions_of(int(token), decodes.rows[i, :context])
                    for i, (token, context) in enumerate(zip(tokens, decodes.contexts, strict=True))
                ]
            )
            rows = decodes.rows.gather(1, chosen.clamp_min(0))
            counts = decodes.counts.clamp_max(topk)
        prefills = {}
        for p in self._view.prefills:
            if p.context > topk:
                own = p.rows
                if isinstance(own, slice):
                    own = torch.arange(own.start, own.stop)
                prefills[p.begin] = torch.stack(
                    [
                        positions_of(t, own[: p.start + 1 + t - p.begin])
                        for t in range(p.begin, p.end)
                    ]
                )
        return TopK(rows, counts, prefills)

    def routing(self: Gate, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate = gates.setdefault(id(self), len(gates))
        taken = torch.stack([choices.experts[place][gate] for place in batches.places])
        scores = logits.sigmoid() if self.bias is not None else logits.softmax(-1)
        ranked = scores if self.bias is None else scores + self.bias
        for own, ids in zip(ranked.double(), taken, strict=True):
            verdict.add(_route_shortfall(own, ids, self))
        weights = scores.gather(1, taken)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return taken, weights * self.routed_scaling_factor

    with (
        _following(batches),
        mock.patch.object(PagedForward, "select", selecting),
        mock.patch.object(Gate, "__call__", routing),
    ):
        yield verdict


def shortfall(scores: torch.Tensor, chosen: torch.Tensor) -> float:
    """By how much the least of the chosen scores less than the best of the others, as a share of
    the largest score; infinite where the chosen are not so many different ones of these, or the
    scores no numbers."""
    if len(chosen.unique()) < len(chosen) or chosen.min() < 0 or chosen.max() >= len(scores):
        return math.inf
    others = torch.ones(len(scores), dtype=torch.bool).index_fill_(0, chosen, False)
    if not others.any():
        return 0.0
    lacks = float(scores[others].max() - scores[chosen].min())
    if not math.isfinite(lacks):
        return math.inf
    return lacks / float(scores.abs().max()) if lacks > 0 else 0.0


def _route_shortfall(scores: torch.Tensor, ids: torch.Tensor, gate: Gate) -> float:
    """The same of a token's experts: in which groups they lie, and which of those they are."""
    size = len(scores) // gate.n_group
    if gate.n_group == 1:
        return shortfall(scores, ids)
    best = scores.view(gate.n_group, size).topk(min(2 if gate.bias is not None else 1, size)).values
    by_group = best.sum(-1)
    kept = (ids // size).unique()
    if len(kept) > gate.topk_group:
        return math.inf
    rest = by_group.index_fill(0, kept, -torch.inf)
    kept = torch.cat((kept, rest.topk(gate.topk_group - len(kept)).indices))
    inside = torch.cat(
        [torch.arange(g * size, (g + 1) * size) for g in kept.sort().values.tolist()]
    )
    places = torch.searchsorted(inside, ids)
    return max(shortfall(by_group, kept), shortfall(scores[inside], places))
