"""One rank's host tier: its host pool, and the copies between that and its KV pool.

Executes the items that the leader has decided (kvcache.host_plan) for the pages that this rank
owns, and says when each is done. Allocates and evicts nothing, never waits but for a layer that a
forward asks for. Calls, in order: `start` for each item of a step's orders, load-backs first; in
the forward `wait_layer` before anything of the layer's cache is read; `poll` whenever it suits,
from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch

from kernels.copy_pages import copy_pages
from kvcache.host_copies import Copier, Copy, Step, new_copier
from kvcache.host_metadata import CpHiCacheNodeMetadata
from kvcache.host_plan import Backup, HostItem, LoadBack
from kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class _Running:
    item: HostItem
    copy: Copy
    num_bytes: int
    rows: tuple[torch.Tensor, torch.Tensor]  # the copy reads them


class HostTier:
    """A host pool of `num_pages` pages of this rank, and row page 0, which is never used.

    Page-first: each row page is one contiguous object of `page_bytes` bytes: for each of the
    pool's buffers (latent, or keys and values; then index keys), all layers of the page. Pinned
    where the pool is on a GPU. Memory is not touched before it is written where it is not pinned.

    Counters, cumulative: `num_bytes` and `seconds` by direction ("backup", "load_back") of copies
    that have ended, `wait_s` that forwards have waited for layers (on a GPU the wait is the
    stream's, and this stays 0).
    """

    def __init__(self, pool: KVPool, num_pages: int, copier: Copier | None = None) -> None:
        if num_pages <= 0:
            raise ValueError(f"num_pages must be positive, got {num_pages}")
        self.num_pages = num_pages
        self.num_bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = {"backup": 0.0, "load_back": 0.0}
        self.wait_s = 0.0
        self._pool = pool
        self._copier = new_copier(pool.device) if copier is None else copier
        self._lock = threading.Lock()  # of the two that follow
        self._running: list[_Running] = []
        self._acknowledged: list[int] = []  # for the next poll
        # Of each buffer: the pool's pages [layers, row pages, elements of a page in a layer], and
        # the same of the host objects [layers, host row pages, elements].
        self._device: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        buffers = pool.buffers()
        for buffer in buffers:
            self._device.append(buffer.view(len(buffer), pool.num_pages + 1, -1))
        sizes = [len(pages) * pages.shape[2] for pages in self._device]
        self._objects = torch.empty(
            (num_pages + 1, sum(sizes)),
            dtype=buffers[0].dtype,
            pin_memory=pool.device.type == "cuda",
        )
        for part, pages in zip(torch.split(self._objects, sizes, dim=1), self._device, strict=True):
            by_layer = part.view(num_pages + 1, len(pages), pages.shape[2])
            self._host.append(by_layer.transpose(0, 1))

    @property
    def page_bytes(self) -> int:
        """Of one host page: one object."""
        return self._objects[0].nbytes

    @property
    def total_bytes(self) -> int:
        return self._objects.nbytes

    def start(self, item: HostItem) -> Copy | None:
        """Begin this rank's part of an item. None: it owns none of the pages, the item is done.
        ValueError, and nothing has begun, where a device page and its host page have different
        owners: their bytes would cross ranks."""
        device_rows, host_rows = self._owned_rows(item)
        if not len(host_rows):
            with self._lock:
                self._acknowledged.append(item.id)
            return None
        device_rows, host_rows = self._on_device(device_rows), self._on_device(host_rows)
        if isinstance(item, LoadBack):
            steps = [
                partial(self._load_layer, layer, device_rows, host_rows)
                for layer in range(self._pool.geometry.num_layers)
            ]
            copy = self._copier.start("in", steps)
        else:
            out: list[Step] = [partial(self._back_up, device_rows, host_rows)]
            copy = self._copier.start("out", out)
        num_bytes = len(host_rows) * self.page_bytes
        with self._lock:
            self._running.append(_Running(item, copy, num_bytes, (device_rows, host_rows)))
        return copy

    def wait_layer(self, layer: int) -> None:
        """What the caller reads next of `layer`, latent rows and index keys alike, is as the
        load-backs started so far leave it. Raises what a copy raised."""
        begin = time.perf_counter()
        for running in self._running:
            if isinstance(running.item, LoadBack):
                running.copy.wait_step(layer)
        self.wait_s += time.perf_counter() - begin

    def poll(self) -> list[int]:
        """Ids of the items that are done on this rank and were not named before; never waits.
        Raises what a copy raised."""
        with self._lock:
            done, self._acknowledged = self._acknowledged, []
            still: list[_Running] = []
            for running in self._running:
                if not running.copy.is_done():
                    still.append(running)
                    continue
                kind = "backup" if isinstance(running.item, Backup) else "load_back"
                self.num_bytes[kind] += running.num_bytes
                self.seconds[kind] += running.copy.seconds
                done.append(running.item.id)
            self._running = still
        return done

    def close(self) -> None:
        """Wait for the copies under way and end."""
        self._copier.close()

    def object(self, host_row_page: int) -> torch.Tensor:
        """[page_bytes] uint8: the contiguous bytes of one host row page, for storage and checks."""
        return self._objects[host_row_page].view(torch.uint8)

    def _owned_rows(self, item: HostItem) -> tuple[torch.Tensor, torch.Tensor]:
        """Row pages [num_owned] of this rank: (in the pool, in the host pool)."""
        layout = self._pool.layout
        device = torch.tensor(item.device_pages, dtype=torch.int64)
        host = torch.tensor(item.host_pages, dtype=torch.int64)
        if device.shape != host.shape or not torch.equal(layout.owner(device), layout.owner(host)):
            raise ValueError(
                "each device page must have the owner of its host page, got device pages "
                f"{item.device_pages} and host pages {item.host_pages} on {layout.cp_size} ranks"
            )
        record = CpHiCacheNodeMetadata.of(item.host_pages, layout)
        device_rows = layout.row_page(device[record.owned_positions])
        _check_rows("device", device_rows, self._pool.num_pages)
        _check_rows("host", record.host_indices, self.num_pages)
        return device_rows, record.host_indices

    def _on_device(self, rows: torch.Tensor) -> torch.Tensor:
        """In order with the device's work, and without waiting for it."""
        if self._pool.device.type == "cpu":
            return rows
        return rows.pin_memory().to(self._pool.device, non_blocking=True)

    def _back_up(self, device_rows: torch.Tensor, host_rows: torch.Tensor) -> None:
        for device, host in zip(self._device, self._host, strict=True):
            copy_pages(host, host_rows, device, device_rows)

    def _load_layer(self, layer: int, device_rows: torch.Tensor, host_rows: torch.Tensor) -> None:
        for buffer, place in self._pool.layer_buffers(layer):
            one = slice(place, place + 1)
            copy_pages(self._device[buffer][one], device_rows, self._host[buffer][one], host_rows)


def _check_rows(which: str, rows: torch.Tensor, num_pages: int) -> None:
    if len(rows) and not 1 <= int(rows.min()) <= int(rows.max()) <= num_pages:
        raise ValueError(f"{which} row pages must be in 1 to {num_pages}, got {rows.tolist()}")
