"""This rank's KV rows: the buffers, layer by layer, and how the tokens of one forward reach them.

Callers speak locs; rows exist below this line only. Knows no request, no attention and no
allocation policy: who owns a page is the layout's map, which page is free the allocator's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kernels.fp8_keys import E4M3, Fp8Keys, IndexKeys, store_keys
from kernels.store_kv import store_rows
from kvcache.blocks import Block, plan_blocks
from kvcache.layout import KVGeometry
from kvcache.sharding import CpSharedKVLayout
from kvcache.transfer.record import BufferRecord, PoolRecord

Source: TypeAlias = Literal["latent", "kv", "index_keys"]
Pages: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the new tokens of one forward are written: computed once, used by every layer."""

    rows: torch.Tensor  # [num_owned] int64
    tokens: torch.Tensor | None  # [num_owned] int64, which tokens those are; None: all, in order


class KVPool:
    """Buffers for `num_pages` pages of this rank plus the dummy page, which is row page 0.

    Memory is not touched before it is written, so a large pool costs address space first. Rows that
    were never written hold anything, NaN included: readers must not let them into a result, and
    padding is read from rows known to be written.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layout: CpSharedKVLayout,
        num_pages: int,  # physical: of this rank, without the dummy page
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages <= 0:
            raise ValueError(f"num_pages must be positive, got {num_pages}")
        self.geometry = geometry
        self.num_pages = num_pages
        self._dtype = dtype
        self._device = torch.device(device)
        self._layout = layout
        num_rows = (num_pages + 1) * layout.page_size

        def buffer(num_layers: int, *widths: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty((num_layers, num_rows, *widths), dtype=dtype, device=device)

        g = geometry
        num_indexers = len(g.index_layers)
        heads = (g.num_kv_heads, g.head_dim)
        num_latent = g.num_layers if g.latent_dim else 0
        num_gqa = g.num_layers if g.num_kv_heads else 0
        self._latent = buffer(num_latent, g.latent_dim)  # [layers, rows, latent KV | rope key]
        self._keys = buffer(num_gqa, *heads)  # [layers, rows, kv heads, head_dim]
        self._values = buffer(num_gqa, *heads)
        # [indexers, rows, index_dim]; in fp8 bytes, which make sense by whole pages only
        self._index_keys = (
            buffer(num_indexers, g.index_row_bytes(dtype.itemsize), dtype=torch.uint8)
            if g.fp8_index_keys
            else buffer(num_indexers, g.index_dim)
        )
        self._index_slot = {layer: slot for slot, layer in enumerate(g.index_layers)}
        # Called with the layer before its rows are read: they may still be on their way.
        self.before_read: Callable[[int], None] = lambda layer: None

    @classmethod
    def create(
        cls,
        geometry: KVGeometry,
        page_size: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> KVPool:
        """The pool of rank `cp_rank`; for callers above the border, who know no layout."""
        layout = CpSharedKVLayout(page_size, cp_size, cp_rank)
        return cls(geometry, layout, num_pages, dtype, device)

    @property
    def layout(self) -> CpSharedKVLayout:
        """For the neighbours below the border that move this rank's pages."""
        return self._layout

    @property
    def cp_size(self) -> int:
        """Ranks that the logical pages lie on; 1 where this rank has them all."""
        return self._layout.cp_size

    @property
    def page_size(self) -> int:
        return self._layout.page_size

    @property
    def logical_pages(self) -> int:
        """Pages the whole group holds; they are numbered from 1."""
        return self.num_pages * self._layout.cp_size

    @property
    def logical_tokens(self) -> int:
        return self._layout.logical_size(self.num_pages * self.page_size)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's buffers, the dummy page included."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All that pages consist of, each [layers, rows, ...], for transfers and the host tier. A
        page is contiguous in a layer; what its rows are is the buffer's own."""
        return tuple(
            b for b in (self._latent, self._keys, self._values, self._index_keys) if b.numel()
        )

    def layer_buffers(self, layer: int) -> list[tuple[int, int]]:
        """Where a layer's rows lie: (which of `buffers()`, its place in that one). All that tokens
        leave in this layer, index keys too."""
        places: list[tuple[int, int]] = []
        num_kv = sum(1 for b in (self._latent, self._keys, self._values) if b.numel())
        places += [(i, layer) for i in range(num_kv)]
        if layer in self._index_slot:
            places.append((num_kv, self._index_slot[layer]))
        return places

    def record(self) -> PoolRecord:
        """What a peer must know to write pages into this pool, or read them from it."""
        num_row_pages = self.num_pages + 1
        named = {
            "latent": self._latent,
            "keys": self._keys,
            "values": self._values,
            "index_keys": self._index_keys,
        }
        return PoolRecord(
            page_size=self.page_size,
            num_row_pages=num_row_pages,
            buffers=tuple(
                BufferRecord(
                    name=name,
                    dtype=self._stored_as(name),
                    address=buffer.data_ptr(),
                    num_layers=len(buffer),
                    layer_bytes=buffer[0].nbytes,
                    page_bytes=buffer[0].nbytes // num_row_pages,
                )
                for name, buffer in named.items()
                if buffer.numel()
            ),
        )

    def _stored_as(self, name: str) -> str:
        is_fp8 = name == "index_keys" and self.geometry.fp8_index_keys
        return str(E4M3 if is_fp8 else self._dtype).removeprefix("torch.")

    def owned_pages(self, pages: Pages, positions: Pages) -> tuple[Pages, Pages]:
        """This rank's share of a page list, both [num_pages]: (row pages, their positions)."""
        return self._layout.filter_owned_pages(pages, positions)

    @staticmethod
    def page_bytes(geometry: KVGeometry, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, for sizing a pool by memory."""
        return geometry.bytes_per_token(dtype.itemsize) * page_size

    # What a streamed read asks for. A source is a kind of row, by name: what one token leaves in a
    # layer for attention ("latent" or "kv") or for the indexer ("index_keys").

    def row_bytes(self, source: Source) -> int:
        """Of one token's row, an index key's scale included."""
        g, size = self.geometry, self._dtype.itemsize
        if source == "index_keys":
            return g.index_row_bytes(size)
        return size * (g.latent_dim if source == "latent" else 2 * g.num_kv_heads * g.head_dim)

    def pages_in(self, source: Source, workspace: torch.Tensor, num_pages: int) -> torch.Tensor:
        """The beginning of a workspace as so many pages, [num_pages, page_size, width]; of index
        keys in fp8 [num_pages, words]."""
        page_bytes = self.page_size * self.row_bytes(source)
        raw = workspace[: num_pages * page_bytes]
        if source == "index_keys" and self.geometry.fp8_index_keys:
            return raw.view(torch.int32).view(num_pages, -1)
        return raw.view(self._dtype).view(num_pages, self.page_size, -1)

    def read_pages(
        self, source: Source, layer: int, row_pages: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Copy whole pages of this rank: row_pages [n] int64 -> out, n pages as `pages_in` has
        them. What a page holds beyond its request's last token is anything."""
        if source == "kv":
            half = out.shape[2] // 2
            both = ((self.keys(layer), out[..., :half]), (self.values(layer), out[..., half:]))
            for rows, part in both:
                part.copy_(rows.view(-1, self.page_size, half)[row_pages])
            return
        if source == "latent":
            rows = self.latent(layer)
        else:
            self.before_read(layer)
            rows = self._index_keys[self._slot_of(layer)]
        pages = rows.view(out.dtype).view(self.num_pages + 1, *out.shape[1:])
        torch.index_select(pages, 0, row_pages, out=out)

    def index_rows(self, pages: torch.Tensor) -> IndexKeys:
        """The index keys in pages that were read."""
        if self.geometry.fp8_index_keys:
            return Fp8Keys(pages.view(torch.uint8), self.page_size)
        return pages.flatten(0, 1)

    # What a token's index key is between ranks: a row of its own, as it is stored.

    def pack_index_keys(self, key: torch.Tensor) -> torch.Tensor:
        """key [T, index_dim] -> [T, ...]"""
        return Fp8Keys.quantised(key).pages if self.geometry.fp8_index_keys else key

    def unpack_index_keys(self, packed: torch.Tensor) -> IndexKeys:
        return Fp8Keys(packed) if self.geometry.fp8_index_keys else packed

    def plan_blocks(
        self, contexts: Sequence[Sequence[int]], lengths: Sequence[int], pages_per_rank: int
    ) -> list[Block]:
        """The blocks in which these contexts are read: see kvcache.blocks.plan_blocks."""
        return plan_blocks(contexts, lengths, self._layout, pages_per_rank, self._device)

    def new_workspace(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 on the rows' device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def rows(self, locs: torch.Tensor) -> torch.Tensor:
        """Row of each loc, same shape. Meaningful for locs that this rank owns."""
        return self._layout.row(locs)

    def row_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Row page of each logical page, same shape and dtype: as for `rows`."""
        return pages if self._layout.cp_size == 1 else self._layout.row_page(pages)

    def destination(self, locs: torch.Tensor) -> Destination:
        """Where tokens with these locs [T] are written: the owned ones only. One rank owns all, and
        padding (the dummy page) goes to row page 0."""
        rows = self._layout.row(locs)
        if self._layout.cp_size == 1:
            return Destination(rows, None)
        tokens = self._layout.owned_by_this_rank(locs).nonzero()[:, 0]
        return Destination(rows[tokens], tokens)

    # What is read goes through these four.

    def latent(self, layer: int) -> torch.Tensor:
        """[rows, latent_dim]: latent KV, then the roped key."""
        self.before_read(layer)
        return self._latent[layer]

    def keys(self, layer: int) -> torch.Tensor:
        """[rows, num_kv_heads, head_dim]"""
        self.before_read(layer)
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """[rows, num_kv_heads, head_dim]"""
        self.before_read(layer)
        return self._values[layer]

    def index_keys(self, layer: int) -> IndexKeys:
        """[rows, index_dim]. Raises ValueError for a layer without an indexer of its own."""
        self.before_read(layer)
        return self._index_rows(layer)

    def _index_rows(self, layer: int) -> IndexKeys:
        rows = self._index_keys[self._slot_of(layer)]
        if self.geometry.fp8_index_keys:
            return Fp8Keys(rows.view(self.num_pages + 1, -1), self.page_size)
        return rows

    def _slot_of(self, layer: int) -> int:
        slot = self._index_slot.get(layer)
        if slot is None:
            raise ValueError(
                f"layer {layer} has no indexer; layers with one: {self.geometry.index_layers}"
            )
        return slot

    def store_latent(
        self,
        layer: int,
        to: Destination,
        latent: torch.Tensor,  # [T, kv_lora_rank]
        k_pe: torch.Tensor,  # [T, qk_rope_head_dim]
    ) -> None:
        store_rows(self._latent[layer], to.rows, to.tokens, latent, k_pe)

    def store_kv(
        self,
        layer: int,
        to: Destination,
        k: torch.Tensor,  # [T, num_kv_heads, head_dim]
        v: torch.Tensor,  # [T, num_kv_heads, head_dim]
    ) -> None:
        store_rows(self._keys[layer], to.rows, to.tokens, k)
        store_rows(self._values[layer], to.rows, to.tokens, v)

    def store_index_key(self, layer: int, to: Destination, key: IndexKeys) -> None:
        """key: [T, index_dim], or already quantised where the pool's are. Raises ValueError for a
        layer without an indexer of its own."""
        cache = self._index_rows(layer)
        if isinstance(cache, Fp8Keys):
            store_keys(cache, to.rows, to.tokens, key)
        else:
            assert isinstance(key, torch.Tensor), "this pool's index keys have the cache's dtype"
            store_rows(cache, to.rows, to.tokens, key)
