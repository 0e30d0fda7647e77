"""What an engine does for a device that is apart from the host, in this process: staged copies, two
page tables, decode steps that are replayed. What is not waited for is an error here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import engine.loading
import engine.staging
from engine.attention.tables import TableAttention
from engine.decode_graphs import DecodeGraphs, _Graph
from engine.page_tables import PageTables
from engine.staging import Staging

CPU = torch.device("cpu")


class Pinned:
    """Host memory that nobody may touch while a copy reads it: until its event was waited for."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self._is_read = False
        self.copied = SimpleNamespace(record=self._record, synchronize=self._synchronize)

    @property
    def bytes(self) -> torch.Tensor:
        assert not self._is_read, "a copy of this memory may be under way"
        return self._bytes

    def _record(self) -> None:
        self._is_read = True

    def _synchronize(self) -> None:
        self._is_read = False


class StagingApart(Staging):
    """Copies, as to a device."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self._shares = False


class TablesApart(PageTables):
    """Two tables, as with a device."""

    def __init__(self, max_running: int, max_pages: int, device: torch.device = CPU) -> None:
        super().__init__(max_running, max_pages, device)
        self._is_apart = True
        self.table = self.table.clone()


def stage_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.staging, "_Pinned", Pinned)


def run_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded from here on run as on a GPU, in the torch forms of its kernels."""

    def record(graphs: DecodeGraphs, size: int, selects: bool) -> _Graph:
        hidden, pool = graphs._forward(size, selects), graphs._pool

        def replay() -> None:
            """As the device alone does it: nobody asks whether a layer's rows are there."""
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pool, "before_read", lambda layer: None)
                hidden.copy_(graphs._forward(size, selects))

        return _Graph(SimpleNamespace(replay=replay), hidden)  # type: ignore[arg-type]

    stage_apart(monkeypatch)
    monkeypatch.setattr(engine.loading, "local_attention", TableAttention)
    monkeypatch.setattr(engine.loading, "Staging", StagingApart)
    monkeypatch.setattr(engine.loading, "PageTables", TablesApart)
    monkeypatch.setattr(engine.loading, "_records", lambda config, device: config.cuda_graphs)
    monkeypatch.setattr(DecodeGraphs, "_record", record)
    for name in ("graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
