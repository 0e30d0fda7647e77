"""Attention of one rank's share of the tokens over a pool that its group holds together.

What the ranks computed of the chunk is gathered once a layer and stored by the pages' owners; the
earlier context is streamed: its pages are gathered block by block, one block ahead of the
computation, into a workspace of two blocks whatever the context. Every collective is entered from
values that the plan carries, never from a rank's own share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, get_args

import torch

from engine.attention.base import Selection
from engine.attention.mla import ChosenMlaRun, MlaQueries, MlaRun, reads_chosen
from engine.attention.running import CausalRun, Positions, RunningTopK
from engine.batch import ForwardBatch
from engine.parallel.mesh import Gathered, Mesh
from engine.parallel.share import Share
from kernels.fp8_keys import IndexKeys
from kvcache.blocks import Block
from kvcache.pool import KVPool, Source

SOURCES: Final[tuple[Source, ...]] = get_args(Source)
Rows = TypeVar("Rows", torch.Tensor, IndexKeys)


@dataclass(frozen=True, slots=True)
class OwnRun:
    """One run of this rank: its tokens [begin, end) of the local ones, request `req`."""

    req: int
    begin: int
    end: int
    at: Positions


@dataclass(frozen=True, slots=True)
class GroupTopK:
    """For each of this rank's runs int64 [num_queries, topk], positions ascending, -1 behind the
    chosen; None: the run sees no more than topk tokens, so all are chosen."""

    positions: tuple[torch.Tensor | None, ...]


class GroupAttention:
    """Makes one Attention (engine/attention/base.py) for each forward. Owns the workspace."""

    def __init__(self, pool: KVPool, mesh: Mesh, block_tokens: int) -> None:
        if block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, got {block_tokens}")
        self.pool = pool
        self._mesh = mesh
        num_pages = -(-block_tokens // pool.page_size)
        self.pages_per_rank = -(-num_pages // pool.cp_size)
        part = self.pages_per_rank * pool.page_size * max(map(pool.row_bytes, SOURCES))
        whole = part * pool.cp_size if pool.cp_size > 1 else 0
        self._parts = [pool.new_workspace(part) for _ in range(2)]
        self._wholes = [pool.new_workspace(whole) for _ in range(2)]

    @property
    def workspace_bytes(self) -> int:
        """Constant: two blocks, and this rank's contribution to each."""
        return sum(t.nbytes for t in (*self._parts, *self._wholes))

    @property
    def most_keys(self) -> int:
        """Rows of one block."""
        return self.pages_per_rank * self.pool.cp_size * self.pool.page_size

    def begin(self, batch: ForwardBatch, share: Share) -> GroupForward:
        return GroupForward(self, batch, share)

    def walk(self, source: Source, layer: int, blocks: Sequence[Block]) -> Iterator[torch.Tensor]:
        """The gathered pages of each block in turn, cp_size * most of them as the pool has them;
        valid until the next is asked for."""
        under_way = self._start(source, layer, blocks, 0)
        for i in range(len(blocks)):
            pages, gather = under_way
            if i + 1 < len(blocks):
                under_way = self._start(source, layer, blocks, i + 1)
            if gather is not None:
                gather.wait()
            yield pages

    def _start(
        self, source: Source, layer: int, blocks: Sequence[Block], i: int
    ) -> tuple[torch.Tensor, Gathered | None]:
        pool = self.pool
        if i >= len(blocks):
            return self._parts[0], None
        most = blocks[i].most
        part = pool.pages_in(source, self._parts[i % 2], most)
        pool.read_pages(source, layer, blocks[i].own, part)
        if pool.cp_size == 1:  # every rank has the whole
            return part, None
        whole = pool.pages_in(source, self._wholes[i % 2], pool.cp_size * most)
        return whole, self._mesh.start_gather(part, whole.view(pool.cp_size, *part.shape))


class GroupForward:
    """One forward's attention; see engine.attention.base.Attention for the contract."""

    def __init__(self, owner: GroupAttention, batch: ForwardBatch, share: Share) -> None:
        self._owner = owner
        self._pool = owner.pool
        self._share = share
        self._starts, self._lengths = batch.starts, batch.lengths
        self._begins = [sum(batch.lengths[:b]) for b in range(len(batch.lengths))]
        self._max_context = max(s + n for s, n in zip(batch.starts, batch.lengths, strict=True))
        self._most_keys = max(owner.most_keys, *batch.lengths)
        self._destination = self._pool.destination(batch.out_loc)
        self._blocks = self._pool.plan_blocks(
            batch.page_table.tolist(), batch.starts, owner.pages_per_rank
        )
        self._runs: list[OwnRun] = []
        begin = 0
        for run in share.runs:
            start = batch.starts[run.req] + run.first - self._begins[run.req]
            at = Positions(start, run.num, run.stride)
            self._runs.append(OwnRun(run.req, begin, begin + run.num, at))
            begin += run.num
        self._index_keys: IndexKeys = torch.empty(0)  # [T, index_head_dim] of the whole chunk

    def store_index_key(self, layer: int, key: torch.Tensor) -> None:
        packed = self._share.gather(self._pool.pack_index_keys(key))
        self._index_keys = self._pool.unpack_index_keys(packed)
        self._pool.store_index_key(layer, self._destination, self._index_keys)

    def needs_selection(self, topk: int) -> bool:
        return self._max_context > topk

    def select(self, layer: int, q: torch.Tensor, weights: torch.Tensor, topk: int) -> GroupTopK:
        running = [
            RunningTopK(q[r.begin : r.end], weights[r.begin : r.end], r.at, topk, self._most_keys)
            if r.at.last >= topk
            else None
            for r in self._runs
        ]
        chunk, rows_of = self._index_keys, self._pool.index_rows
        for req, begin, keys in self._context("index_keys", layer, rows_of, chunk):
            for run, top in zip(self._runs, running, strict=True):
                if run.req == req and top is not None:
                    top.add(keys, begin)
        return GroupTopK(tuple(top.finish() if top is not None else None for top in running))

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
        queries = MlaQueries(q_nope, q_pe, w_uk, w_uv, scale)
        chosen = selection.positions if isinstance(selection, GroupTopK) else ()
        running = [
            self._mla_run(queries.slice(run.begin, run.end), run.at, chosen[i] if chosen else None)
            for i, run in enumerate(self._runs)
        ]
        for req, begin, rows in self._context("latent", layer, _rows, chunk):
            for run, part in zip(self._runs, running, strict=True):
                if run.req == req:
                    part.add(rows, begin)
        out = q_pe.new_zeros((len(q_pe), *w_uv.shape[:2]))  # also where no run is ours
        for run, part in zip(self._runs, running, strict=True):
            out[run.begin : run.end] = part.finish()
        return out

    def _mla_run(
        self, queries: MlaQueries, at: Positions, chosen: torch.Tensor | None
    ) -> MlaRun | ChosenMlaRun:
        if chosen is not None and reads_chosen(chosen, at.last + 1):
            return ChosenMlaRun(queries, chosen)
        return MlaRun(queries, at, chosen, self._most_keys)

    def gqa(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        num_kv, dim = k.shape[1:]
        chunk = self._share.gather(torch.cat((k.flatten(1), v.flatten(1)), dim=-1))
        keys, values = chunk.view(len(chunk), 2, num_kv, dim).unbind(1)
        self._pool.store_kv(layer, self._destination, keys, values)
        running = [CausalRun(q[run.begin : run.end], run.at, scale) for run in self._runs]
        for req, begin, rows in self._context("kv", layer, _rows, chunk):
            keys, values = rows.view(len(rows), 2, num_kv, dim).unbind(1)
            for run, part in zip(self._runs, running, strict=True):
                if run.req == req:
                    part.add(keys, values, begin)
        out = torch.zeros_like(q)
        for run, part in zip(self._runs, running, strict=True):
            out[run.begin : run.end] = part.finish()
        return out

    def _context(
        self,
        source: Source,
        layer: int,
        rows_of: Callable[[torch.Tensor], Rows],  # what gathered pages hold
        chunk: Rows,
    ) -> Iterator[tuple[int, int, Rows]]:
        """(request, position of the first, rows [L, width]) of everything that the batch's requests
        may attend to, each in ascending position: the streamed context, then the chunk itself."""
        for block, pages in zip(
            self._blocks, self._owner.walk(source, layer, self._blocks), strict=True
        ):
            gathered = rows_of(pages)
            for req, span in enumerate(block.spans):
                if span is not None:
                    yield req, span.begin, gathered[span.rows]
        for req, (begin, length) in enumerate(zip(self._begins, self._lengths, strict=True)):
            yield req, self._starts[req], chunk[begin : begin + length]


def _rows(pages: torch.Tensor) -> torch.Tensor:
    return pages.flatten(0, 1)
