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

_STAGED_PAGE_BYTES = 2**20  # from here on one page is worth a copy of its own
_STAGING_BYTES = 64 * 2**20


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

    On a GPU a load-back is a kernel that reads host memory, as layers must arrive in order. One
    that writes there would hold up the forward's own memory traffic, so a backup gathers a few
    pages at a time into objects on the device and has the copy engine take each; pages too small
    for that go by the kernel. `staged_pages`: how many at a time, 0: none; by default by the
    device and the page.

    Counters, cumulative: `num_bytes` and `seconds` by direction ("backup", "load_back") of copies
    that have ended, `wait_s` that forwards have waited for layers (on a GPU the wait is the
    stream's, and this stays 0).
    """

    def __init__(
        self,
        pool: KVPool,
        num_pages: int,
        copier: Copier | None = None,
        *,
        staged_pages: int | None = None,
    ) -> None:
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
        self._steps = _in_steps(pool.geometry.num_layers)
        self._step_of = [i for i, layers in enumerate(self._steps) for _ in layers]
        # Of each buffer, the pool's pages: [layers, row pages, bytes of a page in a layer].
        self._device = [
            buffer.view(len(buffer), pool.num_pages + 1, -1).view(torch.uint8)
            for buffer in pool.buffers()
        ]
        page_bytes = sum(len(pages) * pages.shape[2] for pages in self._device)
        is_cuda = pool.device.type == "cuda"
        self._objects = torch.empty(
            (num_pages + 1, page_bytes), dtype=torch.uint8, pin_memory=is_cuda
        )
        self._host = self._by_layer(self._objects)
        if staged_pages is None:
            is_staged = is_cuda and self.page_bytes >= _STAGED_PAGE_BYTES
            staged_pages = max(1, _STAGING_BYTES // self.page_bytes) if is_staged else 0
        self._staging = torch.empty(
            (staged_pages, page_bytes), dtype=torch.uint8, device=pool.device
        )
        self._staged = self._by_layer(self._staging)
        self._staged_rows = torch.arange(staged_pages, device=pool.device)

    @property
    def page_bytes(self) -> int:
        """Of one host page: one object."""
        return self._objects.shape[1]

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
        places = host_rows.tolist()
        device_rows, host_rows = self._on_device(device_rows), self._on_device(host_rows)
        if isinstance(item, LoadBack):
            steps: list[Step] = [
                partial(self._load_layers, layers, device_rows, host_rows) for layers in self._steps
            ]
            copy = self._copier.start("in", steps)
        else:
            back_up = partial(self._back_up, device_rows, host_rows)
            if len(self._staging):
                back_up = partial(self._back_up_staged, device_rows, places)
            copy = self._copier.start("out", [back_up])
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
                running.copy.wait_step(self._step_of[layer])
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
        return self._objects[host_row_page]

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

    def _back_up_staged(self, device_rows: torch.Tensor, places: list[int]) -> None:
        num_staged = len(self._staging)
        for begin in range(0, len(places), num_staged):
            rows = device_rows[begin : begin + num_staged]
            for device, staged in zip(self._device, self._staged, strict=True):
                copy_pages(staged, self._staged_rows[: len(rows)], device, rows)
            for staged_page, place in zip(self._staging, places[begin:], strict=False):
                self._objects[place].copy_(staged_page, non_blocking=True)

    def _load_layers(
        self, layers: range, device_rows: torch.Tensor, host_rows: torch.Tensor
    ) -> None:
        places: dict[int, list[int]] = {}
        for layer in layers:
            for buffer, place in self._pool.layer_buffers(layer):
                places.setdefault(buffer, []).append(place)
        for buffer, found in places.items():  # layers that follow each other do so in each buffer
            part = slice(found[0], found[-1] + 1)
            copy_pages(self._device[buffer][part], device_rows, self._host[buffer][part], host_rows)

    def _by_layer(self, objects: torch.Tensor) -> list[torch.Tensor]:
        """Views of objects [pages, bytes], for each buffer [layers, pages, bytes]."""
        sizes = [len(pages) * pages.shape[2] for pages in self._device]
        parts = zip(torch.split(objects, sizes, dim=1), self._device, strict=True)
        return [
            part.view(len(objects), len(pages), pages.shape[2]).transpose(0, 1)
            for part, pages in parts
        ]


def _in_steps(num_layers: int) -> list[range]:
    """The layers that a load-back brings at a time. The first alone, as the forward waits for it;
    then more, as each step costs its launches and the forward is layers behind."""
    steps: list[range] = []
    begin, num = 0, 1
    while begin < num_layers:
        steps.append(range(begin, min(begin + num, num_layers)))
        begin, num = steps[-1].stop, min(num + (len(steps) > 1), 4)
    return steps


def _check_rows(which: str, rows: torch.Tensor, num_pages: int) -> None:
    if len(rows) and not 1 <= int(rows.min()) <= int(rows.max()) <= num_pages:
        raise ValueError(f"{which} row pages must be in 1 to {num_pages}, got {rows.tolist()}")
