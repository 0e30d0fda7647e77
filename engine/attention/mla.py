"""Latent attention's queries, and one run of them fed with cache rows part by part: absorbed (all
heads read the latent row itself) or expanded to keys and values by head, whichever costs less."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from engine.attention.running import Positions, RunningAttention, workspace_bytes
from kernels.attention import Partial, attend, merge, values_of

_GATHER_RATIO: Final = 4  # context to top-k


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
        """Cache rows [L, D] -> keys [H, L, nope + rope] and values [H, L, v_head_dim]."""
        num_heads = self.w_uv.shape[0]
        latent, k_pe = rows[:, : self.latent_dim], rows[:, self.latent_dim :]
        wide = self.q_pe.dtype
        shared = k_pe.to(wide).expand(num_heads, -1, -1)
        latent = latent.to(wide).expand(num_heads, -1, -1)
        v = torch.bmm(latent, self.w_uv.to(wide).transpose(1, 2))
        if self.q_nope.shape[-1] == 0:
            return shared, v
        k_nope = torch.bmm(latent, self.w_uk.to(wide).transpose(1, 2))
        return torch.cat((k_nope, shared), dim=-1), v


def reads_chosen(chosen: torch.Tensor, context: int) -> bool:
    """Whether reading only the chosen rows, query by query, beats masking all the scores."""
    return context > _GATHER_RATIO * chosen.shape[1]


class MlaRun:
    """One run of queries over cache rows; `add` each part of its context, then `finish`."""

    def __init__(
        self,
        queries: MlaQueries,
        at: Positions,
        chosen: torch.Tensor | None,  # see RunningAttention
        most_keys: int,  # of one part
    ) -> None:
        self._queries = queries
        self._expands = queries.expanding_is_cheaper(at.last + 1)
        if self._expands:  # one group a head
            q = torch.cat((queries.q_nope, queries.q_pe), dim=-1).transpose(0, 1)
        else:  # one group: all heads read the same latent row
            q = queries.absorbed().unsqueeze(0).flatten(1, 2)
        self._width = q.shape[-1]
        heads = 1 if self._expands else queries.q_pe.shape[1]
        self._running = RunningAttention(q, heads, at, chosen, queries.scale, most_keys)

    def add(self, rows: torch.Tensor, begin: int) -> None:
        """Cache rows [L, latent | rope] of the positions begin, begin + 1, ..."""
        if self._expands:
            k, v = self._queries.expand(rows)
        else:
            k = rows[:, rows.shape[1] - self._width :].unsqueeze(0)
            v = rows[:, : self._queries.latent_dim].unsqueeze(0)
        self._running.add(k, v, begin)

    def finish(self) -> torch.Tensor:
        """[num_queries, num_heads, v_head_dim]"""
        out = self._running.finish()
        if self._expands:
            return out.transpose(0, 1)  # [H, T, V] -> [T, H, V]
        num_heads = self._queries.q_pe.shape[1]
        return values_of(out.view(-1, num_heads, out.shape[-1]), self._queries.w_uv)


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
        first = (self._chosen < begin).sum(-1)
        counts = (self._chosen < begin + len(rows)).sum(-1) - first
        width = int(counts.max())
        if width == 0:
            return
        inside = torch.arange(width, device=rows.device)
        columns = (first.unsqueeze(1) + inside).clamp_max(self._chosen.shape[1] - 1)
        allowed = inside < counts.unsqueeze(1)  # [num_queries, width]
        at = (self._chosen.gather(1, columns) - begin).masked_fill_(~allowed, 0)
        step = max(1, workspace_bytes(rows.device) // (width * rows.shape[1] * 4))
        parts = [
            self._attend(self._q[a : a + step], rows[at[a : a + step]], allowed[a : a + step])
            for a in range(0, len(at), step)
        ]
        part = Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        self._parts = merge(self._parts, part)

    def _attend(self, q: torch.Tensor, own: torch.Tensor, allowed: torch.Tensor) -> Partial:
        """q [n, H, R], own [n, width, D], allowed [n, width]"""
        keys = own[..., own.shape[-1] - q.shape[-1] :]
        latent = own[..., : self._queries.latent_dim]
        return attend(q, keys, latent, allowed.unsqueeze(1), self._queries.scale)

    def finish(self) -> torch.Tensor:
        """[num_queries, num_heads, v_head_dim]"""
        assert self._parts is not None, "every query sees itself at least"
        return values_of(self._parts.out, self._queries.w_uv)
