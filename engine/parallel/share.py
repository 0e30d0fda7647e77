"""A rank's share of one batch: which tokens it computes, and how the ranks' parts of a per-token
tensor become the whole again. Built once per forward from values that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import ForwardBatch
from engine.parallel.deal import Run, deal
from engine.parallel.mesh import Mesh


class Collector:
    """Puts the ranks' rows of a tensor into one order: rank r holds the rows `held[r]` of the
    whole's range(num)."""

    def __init__(self, mesh: Mesh, held: Sequence[Sequence[int]], num: int) -> None:
        self._mesh = mesh
        self._most = max(len(rows) for rows in held)
        place = [0] * num
        for rank, rows in enumerate(held):
            for i, row in enumerate(rows):
                place[row] = rank * self._most + i
        self._place = torch.tensor(place, dtype=torch.int64, device=mesh.device)

    def __call__(self, own: torch.Tensor) -> torch.Tensor:
        """[len(held[rank]), ...] -> [num, ...] on every rank."""
        padded = own.new_empty((self._most, *own.shape[1:]))
        padded[: len(own)] = own
        padded[len(own) :] = 0
        return self._mesh.all_gather(padded).flatten(0, 1)[self._place]


class Share:
    """What this rank computes of `batch`. With one rank: everything, in order. `token_ids` and
    `positions` are the tokens of `runs`, or one token to be ignored where there are none."""

    def __init__(self, batch: ForwardBatch, mesh: Mesh, mode: str) -> None:
        self._mesh = mesh
        self.token_ids, self.positions = batch.token_ids, batch.positions  # [T_own] int64
        self.runs: list[Run] = []
        if mesh.size == 1:
            return
        dealt = deal(batch.lengths, mesh.size, mode)
        self.runs = dealt[mesh.rank]
        self._held = [[t for run in runs for t in run.tokens] for runs in dealt]
        # A rank without tokens computes one that nobody asks for: no kernel sees an empty batch.
        mine = self._held[mesh.rank] or [0]
        own = torch.tensor(mine, dtype=torch.int64, device=mesh.device)
        self.token_ids, self.positions = batch.token_ids[own], batch.positions[own]
        self._collect = Collector(mesh, self._held, sum(batch.lengths))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a per-token tensor [T_own, ...] -> those of the batch, [T, ...]."""
        if self._mesh.size == 1:
            return own
        return self._collect(own[: len(self._held[self._mesh.rank])])

    def pick(self, own: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The rows of the batch's `tokens` alone: [T_own, D] -> [len(tokens), D]."""
        if self._mesh.size == 1:
            return own[list(tokens)]
        wanted = {token: i for i, token in enumerate(tokens)}
        held = [[wanted[t] for t in rows if t in wanted] for rows in self._held]
        mine = [i for i, t in enumerate(self._held[self._mesh.rank]) if t in wanted]
        return Collector(self._mesh, held, len(tokens))(own[mine])
