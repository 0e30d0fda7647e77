"""The index tensors of one forward, computed once and read by every layer: which rows are written,
which rows each request's context lies in, and how the batch falls into decodes and prefills."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import ForwardBatch
from kvcache.pool import Destination, KVPool


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request with several new tokens: batch tokens [begin, end), at positions start + i."""

    begin: int
    end: int
    start: int  # tokens in the cache before this step
    rows: torch.Tensor | slice  # [context] rows by position; a slice where they are one run

    @property
    def context(self) -> int:
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True)
class Decodes:
    """The requests with one new token each, handled together. Rows past a request's context repeat
    its first one, so that padding reads what is known to be written."""

    tokens: torch.Tensor | None  # [N] int64 batch tokens; None: they are the whole batch
    rows: torch.Tensor  # [N, K] int64 by position, K the longest context
    counts: torch.Tensor  # [N] int64, the contexts
    contexts: tuple[int, ...]  # [N], the same on the host

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.tokens is None else x[self.tokens]


@dataclass(frozen=True, slots=True)
class BatchView:
    destination: Destination
    max_context: int
    decodes: Decodes | None
    prefills: tuple[Prefill, ...]


def view_batch(batch: ForwardBatch, pool: KVPool) -> BatchView:
    """Raises ValueError where the page table is too narrow for a context."""
    contexts = [s + n for s, n in zip(batch.starts, batch.lengths, strict=True)]
    num_pages = -(-max(contexts) // pool.page_size)
    if num_pages > batch.page_table.shape[1]:
        raise ValueError(
            f"a context of {max(contexts)} tokens needs {num_pages} pages of {pool.page_size}, "
            f"the page table has {batch.page_table.shape[1]}"
        )
    pages = batch.page_table[:, :num_pages].long()
    inside = torch.arange(pool.page_size, device=pages.device)
    locs = (pages.unsqueeze(-1) * pool.page_size + inside).flatten(1)  # [B, num_pages · page_size]
    rows = pool.rows(locs)
    single, prefills, begin = [], [], 0
    for b, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        if length == 1:
            single.append(b)
        else:
            own = _run_or_rows(rows[b, : start + length])
            prefills.append(Prefill(begin, begin + length, start, own))
        begin += length
    decodes = _view_decodes(single, batch.lengths, contexts, rows) if single else None
    return BatchView(pool.destination(batch.out_loc), max(contexts), decodes, tuple(prefills))


def _view_decodes(
    single: list[int], lengths: tuple[int, ...], contexts: list[int], rows: torch.Tensor
) -> Decodes:
    own = tuple(contexts[b] for b in single)
    width = max(own)
    tokens = None
    if len(single) < len(lengths):
        first = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)  # first token of each
        tokens = first[single].to(rows.device)
        rows = rows[torch.tensor(single, device=rows.device)]
    counts = torch.tensor(own, device=rows.device)
    rows = rows[:, :width]
    if min(own) < width:
        inside = torch.arange(width, device=rows.device) < counts.unsqueeze(1)
        rows = torch.where(inside, rows, rows[:, :1])
    return Decodes(tokens, rows.contiguous(), counts, own)


def _run_or_rows(rows: torch.Tensor) -> torch.Tensor | slice:
    """Consecutive pages are read in place instead of gathered, which on a CPU saves a copy of the
    context in each layer. Elsewhere the question would wait for the device."""
    if rows.device.type == "cpu" and bool((rows[1:] - rows[:-1] == 1).all()):
        first = int(rows[0])
        return slice(first, first + len(rows))
    return rows
