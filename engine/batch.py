"""One step plan's batch, built once per step by the runner: as arrays on the host, then as tensors
that model and attention read. Knows logical locs only; rows exist below the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.page_tables import PageTables
from engine.plan import Extend
from engine.staging import Staging

Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """B requests, T tokens: request b has lengths[b] new tokens from position starts[b] on."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, absolute
    out_loc: torch.Tensor  # [T] int64, where each token's KV is written
    page_table: torch.Tensor  # [B, P] int32 logical pages; 0 past a request's last page
    starts: tuple[int, ...]  # [B] tokens in the cache before this step
    lengths: tuple[int, ...]  # [B] tokens computed in this step, each >= 1


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """The same on the host."""

    token_ids: Array  # [T]
    positions: Array  # [T]
    out_loc: Array  # [T]
    req_indices: Array  # [B] rows of the page tables
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, extends: Sequence[Extend], tables: PageTables, page_size: int) -> BatchArrays:
        starts = tuple(e.start for e in extends)
        lengths = tuple(len(e.token_ids) for e in extends)
        num_tokens = sum(lengths)
        begins = np.cumsum(lengths) - lengths
        positions = np.arange(num_tokens) + np.repeat(np.array(starts) - begins, lengths)
        ids = chain.from_iterable(e.token_ids for e in extends)
        req_indices = np.array([e.req_index for e in extends], dtype=np.int64)
        return cls(
            token_ids=np.fromiter(ids, dtype=np.int64, count=num_tokens),
            positions=positions,
            out_loc=tables.locs(np.repeat(req_indices, lengths), positions, page_size),
            req_indices=req_indices,
            starts=starts,
            lengths=lengths,
        )

    @property
    def max_context(self) -> int:
        return max(s + n for s, n in zip(self.starts, self.lengths, strict=True))

    def send(self, tables: PageTables, staging: Staging, page_size: int) -> ForwardBatch:
        """To the device; the page table no wider than the longest context needs."""
        token_ids, positions, out_loc, req_indices = staging.send(
            self.token_ids, self.positions, self.out_loc, self.req_indices
        )
        num_pages = -(-self.max_context // page_size)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            out_loc=out_loc,
            page_table=tables.table[:, :num_pages].index_select(0, req_indices),
            starts=self.starts,
            lengths=self.lengths,
        )
