"""Attention of one rank's share of the tokens over a pool that its group holds together.

What the ranks computed of the chunk is gathered once a layer, stored by the pages' owners and read
from there; the earlier context is streamed: its pages are gathered block by block, one block ahead
of the computation, into a workspace of two blocks whatever the context. Partial results merge by
log-sum-exp. Every collective is entered from values that the plan carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import Selection
from engine.attention.stream import MlaQueries, better_topk, chosen_mask, expand_rows, slice_size
from engine.batch import ForwardBatch
from engine.parallel.mesh import Gathered, Mesh
from engine.parallel.share import Share
from kernels.attention import Partial, attend, merge
from kernels.index_logits import index_logits
from kvcache.pool import KVPool

Reader = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Cache rows [L, D] -> keys [G, L, D'] and values [G, L, V]."""


@dataclass(frozen=True, slots=True)
class Queries:
    """One run of this rank's tokens: local tokens [begin, end) of request `req`, at positions
    start, start + stride, ..."""

    req: int
    begin: int
    end: int
    start: int
    stride: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def last(self) -> int:
        return self.start + (len(self) - 1) * self.stride


@dataclass(frozen=True, slots=True)
class GroupTopK:
    """By place among this rank's runs: int64 [num_queries, topk], positions ascending, -1 behind
    the chosen. None: the run sees no more than topk tokens, so all are chosen."""

    positions: tuple[torch.Tensor | None, ...]


class GroupAttention:
    """Makes one Attention (engine/attention/base.py) for each forward. Owns the workspace."""

    def __init__(self, pool: KVPool, mesh: Mesh, block_tokens: int) -> None:
        if block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, got {block_tokens}")
        self.pool = pool
        self.mesh = mesh
        pages = -(-block_tokens // pool.page_size)
        self.pages_per_rank = -(-pages // pool.cp_size)
        width = max(buffer.shape[2:].numel() for buffer in pool.readable())
        block = (pool.cp_size * self.pages_per_rank, pool.page_size * width)
        part = (self.pages_per_rank, pool.page_size * width)
        self._blocks = [pool.new_workspace(*block) for _ in range(2 if pool.cp_size > 1 else 0)]
        self._parts = [pool.new_workspace(*part) for _ in range(2)]

    @property
    def workspace_bytes(self) -> int:
        return sum(t.nbytes for t in (*self._blocks, *self._parts))

    def begin(self, batch: ForwardBatch, share: Share) -> GroupForward:
        return GroupForward(self, batch, share)

    def walk(self, source: str, layer: int, blocks: Sequence[Block]) -> Iterator[torch.Tensor]:
        """Each block's rows in turn, [cp_size * most * page_size, width]; valid until the next."""
        started = [self._start(source, layer, blocks[0], 0)] if blocks else []
        for i in range(len(blocks)):
            if i + 1 < len(blocks):
                started.append(self._start(source, layer, blocks[i + 1], i + 1))
            rows, gather = started[i]
            if gather is not None:
                gather.wait()
            yield rows

    def _start(
        self, source: str, layer: int, block: Block, i: int
    ) -> tuple[torch.Tensor, Gathered | None]:
        pool = self.pool
        row_bytes = pool.page_size * pool.width(source)
        part = self._parts[i % 2][: block.most * row_bytes].view(block.most, row_bytes)
        pool.read_pages(source, layer, block.own, part)
        if pool.cp_size == 1:
            return part.view(-1, pool.width(source)), None
        size = pool.cp_size * block.most
        whole = self._blocks[i % 2][: size * row_bytes].view(pool.cp_size, block.most, row_bytes)
        return whole.view(-1, pool.width(source)), self.mesh.start_gather(part, whole)


class GroupForward:
    """One forward's attention; see engine.attention.base.Attention for the contract."""

    def __init__(self, owner: GroupAttention, batch: ForwardBatch, share: Share) -> None:
        self._owner = owner
        self._pool = owner.pool
        self._share = share
        self._starts = batch.starts
        self._begins = [sum(batch.lengths[:b]) for b in range(len(batch.lengths))]
        self._contexts = [s + n for s, n in zip(batch.starts, batch.lengths, strict=True)]
        self._destination = owner.pool.destination(batch.out_loc)
        self._blocks = owner.pool.plan_blocks(
            batch.page_table.tolist(), batch.starts, owner.pages_per_rank
        )
        self._queries: list[Queries] = []
        begin = 0
        for run in share.runs:
            start = batch.starts[run.req] + run.first - self._begins[run.req]
            self._queries.append(Queries(run.req, begin, begin + run.num, start, run.stride))
            begin += run.num
        self._index_keys = torch.empty(0)  # of the whole chunk, [T, index_head_dim]

    def store_index_key(self, layer: int, key: torch.Tensor) -> None:
        self._index_keys = self._share.gather(key)
        self._pool.store_index_key(layer, self._destination, self._index_keys)

    def needs_selection(self, topk: int) -> bool:
        return max(self._contexts) > topk

    def select(self, layer: int, q: torch.Tensor, weights: torch.Tensor, topk: int) -> GroupTopK:
        running = [
            RunningTopK(own, q[own.begin : own.end], weights[own.begin : own.end], topk)
            if own.last >= topk
            else None
            for own in self._queries
        ]
        for begin, keys, req in self._keys("index_keys", layer, self._index_keys):
            for top in running:
                if top is not None and top.queries.req == req:
                    top.add(keys, begin)
        return GroupTopK(tuple(top.positions() if top is not None else None for top in running))

    def mla(
        self,
        layer: int,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        latent: torch.Tensor,
        k_pe: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        scale: float,
        selection: Selection | None,
    ) -> torch.Tensor:
        chunk = self._share.gather(torch.cat((latent, k_pe), dim=-1))
        rank = latent.shape[-1]
        self._pool.store_latent(layer, self._destination, chunk[:, :rank], chunk[:, rank:])
        whole = MlaQueries(q_nope * scale, q_pe * scale, w_uk, w_uv)
        chosen = [None] * len(self._queries) if selection is None else selection.positions
        parts = [
            MlaRun(own, whole.slice(own.begin, own.end), positions, self._contexts[own.req])
            for own, positions in zip(self._queries, chosen, strict=True)
        ]
        for begin, keys, req in self._keys("latent", layer, chunk):
            for part in parts:
                if part.queries.req == req:
                    part.add(keys, begin)
        out = q_pe.new_empty((len(q_pe), w_uv.shape[0], w_uv.shape[1]))
        for part in parts:
            out[part.queries.begin : part.queries.end] = part.finish()
        return out
