"""Drives a model without a scheduler: owns a pool and its pages, and builds the forward batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.attention.paged import PagedAttention
from engine.attention.stream import BLOCK_TOKENS
from engine.batch import ForwardBatch
from engine.model.base import Model
from kvcache.pool import KVPool
from kvcache.sharding import CpSharedKVLayout


@dataclass(eq=False)
class Running:
    """A request: its tokens, its pages, and how many of its tokens are in the cache."""

    token_ids: list[int]
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0


class Driver:
    """Pages come from a shuffled list, so that nothing can rely on their order; the pool is full of
    NaN, so that nothing can rely on rows that were not written."""

    def __init__(
        self,
        model: Model,
        page_size: int = 64,
        num_pages: int = 80,
        block_tokens: int = BLOCK_TOKENS,
        shuffle: bool = True,
    ) -> None:
        self.model = model
        self.page_size = page_size
        self.pool = KVPool(
            model.geometry, CpSharedKVLayout(page_size), num_pages, torch.float32, "cpu"
        )
        for buffer in self.pool.buffers():
            buffer.fill_(torch.nan)
        self.attention = PagedAttention(self.pool, block_tokens)
        generator = torch.Generator().manual_seed(7)
        order = torch.randperm(num_pages, generator=generator) if shuffle else range(num_pages)
        self.free = [int(page) + 1 for page in order][::-1]

    def start(self, prompt: Sequence[int], like: Running | None = None) -> Running:
        """A new request; `like` gives it the full pages of another whose tokens it begins with, all
        but the last token at most: a prefix hit."""
        request = Running(list(prompt))
        if like is not None:
            same = 0
            limit = min(like.num_cached, len(prompt) - 1)
            while same < limit and like.token_ids[same] == prompt[same]:
                same += 1
            request.pages = like.pages[: same // self.page_size]
            request.num_cached = len(request.pages) * self.page_size
        return request

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Running, int]]) -> list[torch.Tensor]:
        """Compute the next n tokens of each request in one forward: logits [n, vocab] of each."""
        for request, count in work:
            needed = -(-(request.num_cached + count) // self.page_size)
            while len(request.pages) < needed:
                request.pages.append(self.free.pop())
        batch = self.batch(work)
        hidden = self.model.forward(batch.token_ids, batch.positions, self.attention.begin(batch))
        logits = self.model.logits(hidden)
        for request, count in work:
            request.num_cached += count
        return list(logits.split([count for _, count in work]))

    def batch(self, work: Sequence[tuple[Running, int]]) -> ForwardBatch:
        ids, positions, locs = [], [], []
        width = max(len(request.pages) for request, _ in work) + 1  # and one page of padding
        table = torch.zeros((len(work), width), dtype=torch.int64)
        for b, (request, count) in enumerate(work):
            assert 0 < count <= len(request.token_ids) - request.num_cached
            table[b, : len(request.pages)] = torch.tensor(request.pages)
            for position in range(request.num_cached, request.num_cached + count):
                page = request.pages[position // self.page_size]
                ids.append(request.token_ids[position])
                positions.append(position)
                locs.append(page * self.page_size + position % self.page_size)
        return ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            out_loc=torch.tensor(locs),
            page_table=table,
            starts=tuple(request.num_cached for request, _ in work),
            lengths=tuple(count for _, count in work),
        )

    def prefill(self, requests: Sequence[Running], chunk: int = 1 << 30) -> list[torch.Tensor]:
        """Compute all tokens of the requests together, at most `chunk` of each in one forward:
        their logits [num_new, vocab]."""
        parts: list[list[torch.Tensor]] = [[] for _ in requests]
        while True:
            left = [(i, len(r.token_ids) - r.num_cached) for i, r in enumerate(requests)]
            left = [(i, min(n, chunk)) for i, n in left if n]
            if not left:
                return [torch.cat(own) for own in parts]
            for (i, _), logits in zip(
                left, self.step([(requests[i], n) for i, n in left]), strict=True
            ):
                parts[i].append(logits)

    def decode(self, requests: Sequence[Running], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Feed each request its tokens (equally many) one by one, the requests together; the logits
        after each, [num_requests, num_tokens, vocab]."""
        steps = []
        for ids in zip(*tokens, strict=True):
            for request, token in zip(requests, ids, strict=True):
                request.token_ids.append(token)
            steps.append(torch.cat(self.step([(request, 1) for request in requests])))
        return torch.stack(steps, dim=1)

    def greedy(
        self, requests: Sequence[Running], logits: Sequence[torch.Tensor], num_tokens: int
    ) -> list[list[int]]:
        """Go on from the prefill's logits: `num_tokens` greedy tokens of each request."""
        chosen = [[int(own[-1].argmax())] for own in logits]
        while len(chosen[0]) < num_tokens:
            after = self.decode(requests, [[own[-1]] for own in chosen])
            for own, last in zip(chosen, after[:, -1], strict=True):
                own.append(int(last.argmax()))
        return chosen
