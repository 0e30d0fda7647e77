"""Latent attention's queries, and one run of them fed with cache rows part by part: absorbed (all
heads read the latent row itself) or expanded to keys and values by head, whichever costs less."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from engine.attention.running import CausalRun, ChosenRun, Positions
from kernels.attention import Partial, merge, values_of
from kernels.streamed import mla_rows_part

_GATHER_RATIO: Final = 4  # context to top-k
_EXPANDED_BYTES: Final = 256 << 20  # of keys and values by head that exist at a time


@dataclass(frozen=True, slots=True)
class MlaQueries:
    """Queries of T tokens, the two halves of kv_b_proj, and the softmax scale."""

    q_nope: torch.Tensor  # [T, num_heads, qk_nope_head_dim], may be 0 wide
    q_pe: torch.Tensor  # [T, num_heads, qk_rope_head_dim]
    w_uk: torch.Tensor  # [num_heads, qk_nope_head_dim, kv_lora_rank]
    w_uv: torch.Tensor  # [num_heads, v_head_dim, kv_lora_rank]
    scale: float

    @property
    def latent_dim(self) -> int:
        return self.w_uv.shape[2]

    def slice(self, begin: int, end: int) -> MlaQueries:
        return replace(self, q_nope=self.q_nope[begin:end], q_pe=self.q_pe[begin:end])

    def pick(self, tokens: torch.Tensor) -> MlaQueries:
        return replace(self, q_nope=self.q_nope[tokens], q_pe=self.q_pe[tokens])

    def absorbed(self) -> torch.Tensor:
        """Queries against cache rows: [T, H, latent + rope]; [T, H, rope] where nope is 0 wide, as
        the latent then has no part in the score."""
        if self.q_nope.shape[-1] == 0:
            return self.q_pe
        num_queries, num_heads, rope = self.q_pe.shape
        latent = self.latent_dim
        out = self.q_pe.new_empty((num_queries, num_heads, latent + rope))
        by_head, w_uk = self.q_nope.transpose(0, 1), self.w_uk.to(self.q_nope.dtype)
        torch.bmm(by_head, w_uk, out=out[..., :latent].transpose(0, 1))
        out[..., latent:] = self.q_pe
        return out

    def expanding_is_cheaper(self, context: int) -> bool:
        """Whether per-head keys and values cost fewer multiplications than the absorbed form."""
        num_queries, num_heads, rope = self.q_pe.shape
        nope, v_dim, latent = self.w_uk.shape[1], self.w_uv.shape[1], self.latent_dim
        expand = context * latent * (nope + v_dim)
        absorb = num_queries * latent * (nope + v_dim)
        pairs = num_queries * context
        score = latent + rope if nope else rope
        expanded = expand + pairs * (nope + rope + v_dim)
        return num_heads * expanded < num_heads * (absorb + pairs * (score + latent))

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache rows [L, D] -> keys [L, H, nope + rope] and values [L, H, v_head_dim]."""
        num_heads = self.w_uv.shape[0]
        latent, k_pe = rows[:, : self.latent_dim], rows[:, self.latent_dim :]
        wide = self.q_pe.dtype
        shared = k_pe.to(wide).expand(num_heads, -1, -1)
        latent = latent.to(wide).expand(num_heads, -1, -1)
        v = torch.bmm(latent, self.w_uv.to(wide).transpose(1, 2)).transpose(0, 1)
        if self.q_nope.shape[-1] == 0:
            return shared.transpose(0, 1), v
        k_nope = torch.bmm(latent, self.w_uk.to(wide).transpose(1, 2))
        return torch.cat((k_nope, shared), dim=-1).transpose(0, 1), v


def reads_chosen(chosen: torch.Tensor, context: int) -> bool:
    """Whether reading only the chosen rows, query by query, beats masking all the scores. A GPU has
    a kernel for it."""
    return chosen.is_cuda or context > _GATHER_RATIO * chosen.shape[1]


class MlaRun:
    """One run of queries over cache rows; `add` each part of its context, then `finish`."""

    def __init__(
        self,
        queries: MlaQueries,
        at: Positions,
        chosen: torch.Tensor | None,  # see ChosenRun; None: all
        most_keys: int,  # of one part
    ) -> None:
        self._queries = queries
        self._expands = queries.expanding_is_cheaper(at.last + 1)
        if self._expands:
            q = torch.cat((queries.q_nope, queries.q_pe), dim=-1)
        else:  # all heads read the same latent row
            q = queries.absorbed()
        self._width = q.shape[-1]
        self._run = (
            CausalRun(q, at, queries.scale)
            if chosen is None
            else ChosenRun(q, at, chosen, queries.scale, most_keys)
        )

    def add(self, rows: torch.Tensor, begin: int) -> None:
        """Cache rows [L, latent | rope] of the positions begin, begin + 1, ..."""
        if not self._expands:
            k = rows[:, rows.shape[1] - self._width :].unsqueeze(1)
            self._run.add(k, rows[:, : self._queries.latent_dim].unsqueeze(1), begin)
            return
        num_heads, v_dim, _ = self._queries.w_uv.shape
        step = _EXPANDED_BYTES // (num_heads * (self._width + v_dim) * rows.itemsize)
        for a in range(0, len(rows), step):
            self._run.add(*self._queries.expand(rows[a : a + step]), begin + a)

    def finish(self) -> torch.Tensor:
        """[num_queries, num_heads, v_head_dim]"""
        out = self._run.finish()
        return out if self._expands else values_of(out, self._queries.w_uv)


class ChosenMlaRun:
    """The same for a selection much smaller than the context: of each part, only the rows that a
    query has chosen are read."""

    def __init__(self, queries: MlaQueries, chosen: torch.Tensor) -> None:
        self._queries = queries
        self._q = queries.absorbed()  # [num_queries, H, R]
        # Positions ascend; behind the chosen they are beyond every part.
        self._chosen = chosen.masked_fill(chosen < 0, torch.iinfo(chosen.dtype).max)
        self._parts: Partial | None = None

    def add(self, rows: torch.Tensor, begin: int) -> None:
        """Cache rows [L, latent | rope] of the positions begin, begin + 1, ..."""
        most = self._chosen.shape[1]
        first = (self._chosen < begin).sum(-1)
        counts = (self._chosen < begin + len(rows)).sum(-1) - first
        columns = first.unsqueeze(1) + torch.arange(most, device=rows.device)
        at = self._chosen.gather(1, columns.clamp_max_(most - 1)) - begin
        part = mla_rows_part(
            self._q, rows, at, counts, self._queries.latent_dim, self._queries.scale
        )
        self._parts = merge(self._parts, part)

    def finish(self) -> torch.Tensor:
        """[num_queries, num_heads, v_head_dim]"""
        assert self._parts is not None, "every query sees itself at least"
        return values_of(self._parts.out, self._queries.w_uv)
