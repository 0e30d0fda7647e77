"""Decode steps as CUDA graphs: the forward of N requests with one new token each, recorded once for
each of a few N and replayed, which costs the host one launch instead of thousands.

Between those sizes a batch is padded with requests that read and write the dummy page. What a step
decides on the host (whether there is anything to select) has a graph for each answer. Knows no
scheduling and no sampling.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from engine.attention.base import Attention
from engine.batch import Array, BatchArrays, ForwardBatch
from engine.model.base import Model
from engine.page_tables import PageTables
from engine.staging import Staging
from kernels.topk import MOST_ON_GPU
from kvcache.pool import KVPool

log = logging.getLogger("plait.graphs")


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # [size, hidden_size], overwritten by each replay


class DecodeGraphs:
    """`capture` once, then `run` what `takes` accepts."""

    def __init__(
        self,
        model: Model,
        begin_attention: Callable[[ForwardBatch], Attention],
        pool: KVPool,
        tables: PageTables,
        staging: Staging,
        max_running: int,
    ) -> None:
        self._model = model
        self._begin_attention = begin_attention
        self._pool = pool
        self._tables = tables
        self._staging = staging
        self._sizes = batch_sizes(max_running)
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()  # one for all
        self._warm_up_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # token ids, positions, out_locs and req_indices of a batch
        self._inputs = torch.zeros(
            4 * 8 * self._sizes[-1], dtype=torch.uint8, device=tables.table.device
        )

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every graph, the largest first: the others fit into its memory."""
        began = time.perf_counter()
        selects = (False, True) if self._model.index_topk else (False,)
        kinds = [(size, select) for size in reversed(self._sizes) for select in selects]
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for size, select in progress.track(kinds, description="Recording decode steps"):
                self._graphs[size, select] = self._record(size, select)
        log.info(
            "recorded %d graphs of decode steps, of up to %d requests, in %.1f s",
            len(kinds),
            self._sizes[-1],
            time.perf_counter() - began,
        )

    def takes(self, arrays: BatchArrays) -> bool:
        """Every request has one new token."""
        return len(arrays.token_ids) == len(arrays.lengths) <= self._sizes[-1]

    def run(self, arrays: BatchArrays, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [N, hidden_size], valid until the next run. `token_ids` [N]: on the device,
        in place of the arrays'."""
        size = self._sizes[bisect.bisect_left(self._sizes, len(arrays.lengths))]
        topk = self._model.index_topk
        recorded = self._graphs[size, bool(topk) and arrays.max_context > topk]
        self._staging.send(self._padded(arrays, size), out=self._inputs)
        if token_ids is not None:
            self._inputs[: 8 * len(token_ids)].view(torch.int64).copy_(token_ids)
        for layer in range(self._pool.geometry.num_layers):
            self._pool.before_read(layer)
        recorded.graph.replay()
        return recorded.hidden[: len(arrays.lengths)]

    def _record(self, size: int, selects: bool) -> _Graph:
        stream = self._warm_up_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what a first call compiles or loads is not recorded
            self._forward(size, selects)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            hidden = self._forward(size, selects)
        return _Graph(graph, hidden)

    def _forward(self, size: int, selects: bool) -> torch.Tensor:
        inputs = self._inputs[: 4 * 8 * size].view(torch.int64).view(4, size)
        token_ids, positions, out_loc, req_indices = inputs
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            out_loc=out_loc,
            page_table=self._tables.table.index_select(0, req_indices),
            # On the host nothing is known of a replay but this.
            starts=((self._model.index_topk if selects else 0),) * size,
            lengths=(1,) * size,
        )
        return self._model.forward(token_ids, positions, self._begin_attention(batch))

    def _padded(self, arrays: BatchArrays, size: int) -> Array:
        """[4, size]: what `_inputs` holds, with padding requests behind the batch's."""
        padded = np.zeros((4, size), dtype=np.int64)
        num = len(arrays.lengths)
        padded[0, :num] = arrays.token_ids
        padded[1, :num] = arrays.positions
        padded[2, :num] = arrays.out_loc
        padded[3, :num] = arrays.req_indices
        padded[3, num:] = self._tables.padding
        return padded


def can_record(model: Model) -> bool:
    """False, and said, where an indexer chooses so many tokens that torch does it: it waits for the
    device, which no graph can."""
    if model.index_topk <= MOST_ON_GPU:
        return True
    log.warning(
        "decode steps are not recorded as CUDA graphs: the model's index_topk is %d, at most %d can"
        " be; each step's kernels are launched one by one, which is slower",
        model.index_topk,
        MOST_ON_GPU,
    )
    return False


def batch_sizes(max_running: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 64 from there; max_running."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_running, 64)]
    return [size for size in sizes if size < max_running] + [max_running]
