"""The attention of one run of queries, fed with keys part by part in ascending position.

Scores are kept within a fixed workspace by taking the queries in slices; the parts merge by
log-sum-exp, the index stage by a running top-k. Knows neither where keys come from nor who else
computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from kernels.attention import Partial, attend, causal, merge
from kernels.fp8_keys import IndexKeys
from kernels.index_logits import index_logits
from kernels.streamed import attend_causal, workspace_bytes
from kernels.topk import exact_topk

_SLICE_QUERIES: Final = 128  # small enough that causal work above the diagonal is skipped


@dataclass(frozen=True, slots=True)
class Positions:
    """Where a run's queries stand: start, start + stride, ..."""

    start: int
    num: int
    stride: int = 1

    @property
    def last(self) -> int:
        return self.start + (self.num - 1) * self.stride

    def slices(self, scores_per_query: int, device: torch.device) -> list[tuple[int, int]]:
        """Queries [a, b) whose float32 scores stay within the workspace together."""
        step = min(_SLICE_QUERIES, max(1, workspace_bytes(device) // (4 * scores_per_query)))
        return [(a, min(a + step, self.num)) for a in range(0, self.num, step)]

    def visible(self, b: int, begin: int, num_keys: int) -> int:
        """How many of the keys at begin, begin + 1, ... some query before query b may see."""
        return min(num_keys, self.start + (b - 1) * self.stride + 1 - begin)

    def causal_tail(
        self, a: int, b: int, begin: int, visible: int, device: torch.device
    ) -> torch.Tensor | None:
        """bool [b - a, W]: causal mask of the queries [a, b) for the last W of the visible keys,
        those that not all of these queries may see. None: there are none."""
        seen = self.start + a * self.stride  # every query of the slice sees up to this position
        first = max(begin, seen + 1)
        width = begin + visible - first
        return causal(b - a, width, seen - first, self.stride, device) if width > 0 else None


class CausalRun:
    """Softmax attention of one run whose queries see everything up to themselves; `add` each part
    of the keys, then `finish`."""

    def __init__(
        self,
        q: torch.Tensor,  # [num_queries, num_heads, D]
        at: Positions,
        scale: float,
    ) -> None:
        self._q = q
        self._at = at
        self._scale = scale
        self._parts: Partial | None = None

    def add(self, k: torch.Tensor, v: torch.Tensor, begin: int) -> None:
        """Keys [L, num_kv_heads, D] and values [L, num_kv_heads, V] of the positions begin,
        begin + 1, ..."""
        first = self._at.start - begin
        self._parts = attend_causal(self._q, k, v, first, self._at.stride, self._scale, self._parts)

    def finish(self) -> torch.Tensor:
        """[num_queries, num_heads, V] float32"""
        assert self._parts is not None, "every query sees itself at least"
        return self._parts.out


class ChosenRun:
    """Softmax attention of one run over the keys that its queries chose: all scores are computed
    and masked. `add` each part of the keys, then `finish`."""

    def __init__(
        self,
        q: torch.Tensor,  # [num_queries, num_heads, D]
        at: Positions,
        chosen: torch.Tensor,  # int64 [num_queries, K] positions, -1 for none
        scale: float,
        most_keys: int,  # of one part
    ) -> None:
        self._q = q
        self._at = at
        self._chosen = chosen
        self._scale = scale
        self._slices = at.slices(q.shape[1] * most_keys, q.device)
        self._parts: list[Partial | None] = [None] * len(self._slices)

    def add(self, k: torch.Tensor, v: torch.Tensor, begin: int) -> None:
        """As CausalRun.add. Keys and values have as many heads as the queries, or one."""
        keys, values = k.transpose(0, 1), v.transpose(0, 1)  # [G, L, ..]
        groups = len(keys)
        for i, (a, b) in enumerate(self._slices):
            visible = self._at.visible(b, begin, len(k))
            if visible <= 0:
                continue
            mask = _mask_of(self._chosen[a:b], begin, visible)
            own = self._q[a:b].reshape(b - a, groups, -1, k.shape[2]).transpose(0, 1).flatten(1, 2)
            part = attend(own, keys[:, :visible], values[:, :visible], mask, self._scale)
            self._parts[i] = merge(self._parts[i], part)

    def finish(self) -> torch.Tensor:
        """[num_queries, num_heads, V] float32"""
        out = torch.cat([part.out for part in self._parts if part is not None], dim=1)
        num, num_heads, _ = self._q.shape
        return out.view(len(out), num, num_heads // len(out), -1).transpose(0, 1).flatten(1, 2)


class RunningTopK:
    """The exact top-k tokens of each query of one run; `add` each part of the index keys."""

    def __init__(
        self,
        q: torch.Tensor,  # [num_queries, index_n_heads, index_head_dim], scaled
        weights: torch.Tensor,  # [num_queries, index_n_heads]
        at: Positions,
        topk: int,
        most_keys: int,  # of one part
    ) -> None:
        self._q = q
        self._weights = weights
        self._at = at
        self._topk = topk
        self._slices = at.slices(q.shape[1] * most_keys, q.device)
        # (scores, positions) of each slice's best so far, in ascending position
        self._best: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(self._slices)

    def add(self, keys: IndexKeys, begin: int) -> None:
        """Index keys [L, index_head_dim] of the positions begin, begin + 1, ..."""
        for i, (a, b) in enumerate(self._slices):
            visible = self._at.visible(b, begin, len(keys))
            if visible <= 0:
                continue
            scores = index_logits(self._q[a:b], self._weights[a:b], keys[:visible])
            mask = self._at.causal_tail(a, b, begin, visible, scores.device)
            if mask is not None:
                scores[:, visible - mask.shape[1] :].masked_fill_(~mask, -torch.inf)
            self._best[i] = _better(self._best[i], scores, begin, self._topk)

    def finish(self) -> torch.Tensor:
        """int64 [num_queries, topk]: positions of the chosen, ascending, -1 behind them."""
        return torch.cat(list(self._padded()))

    def _padded(self) -> Iterator[torch.Tensor]:
        for best in self._best:
            if best is not None:
                yield functional.pad(best[1], (0, self._topk - best[1].shape[1]), value=-1)


def _better(
    best: tuple[torch.Tensor, torch.Tensor] | None, scores: torch.Tensor, begin: int, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides are in ascending position, so that the earlier of two equal scores is kept."""
    positions = torch.arange(begin, begin + scores.shape[1], device=scores.device)
    positions = positions.expand_as(scores)
    if best is not None:
        scores = torch.cat((best[0], scores), dim=1)
        positions = torch.cat((best[1], positions), dim=1)
    columns = exact_topk(scores, topk)
    absent, columns = columns < 0, columns.clamp_min(0)
    return (
        scores.gather(1, columns).masked_fill_(absent, -torch.inf),
        positions.gather(1, columns).masked_fill_(absent, -1),
    )


def _mask_of(chosen: torch.Tensor, begin: int, visible: int) -> torch.Tensor:
    """bool [num_queries, visible]: which keys of [begin, begin + visible) are chosen. Only tokens
    that a query may see are ever chosen, so no causal mask is needed."""
    columns = chosen - begin
    columns = torch.where((columns < 0) | (columns >= visible), visible, columns)
    mask = torch.zeros((len(chosen), visible + 1), dtype=torch.bool, device=chosen.device)
    return mask.scatter_(1, columns, True)[:, :visible]
