"""The tensor view of one step plan, built once per step by the runner and read by model and
attention. Knows logical locs only; rows exist below the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """B requests, T tokens: request b has lengths[b] new tokens from position starts[b] on."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, absolute
    out_loc: torch.Tensor  # [T] int64, where each token's KV is written
    page_table: torch.Tensor  # [B, P] int64 logical pages; 0 past a request's last page
    starts: tuple[int, ...]  # [B] tokens in the cache before this step
    lengths: tuple[int, ...]  # [B] tokens computed in this step, each >= 1
