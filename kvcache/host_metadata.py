"""A span's place in the host pool as one rank sees it. Owns the record and its split; knows no tree
and no buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcache.sharding import CpSharedKVLayout


@dataclass(frozen=True, slots=True, eq=False)
class CpHiCacheNodeMetadata:
    """Of a span of `logical_len` pages, those that one rank owns: which positions of the span, and
    which row pages of its host pool hold them. On the CPU; both lists may be empty. ValueError for
    a negative length, lists that are not one-dimensional int64 and equally long, or positions that
    are not ascending, each once, inside [0, logical_len).
    """

    logical_len: int  # pages
    owned_positions: torch.Tensor  # [num_owned] int64, ascending
    host_indices: torch.Tensor  # [num_owned] int64, row pages of this rank's host pool

    def __post_init__(self) -> None:
        if self.logical_len < 0:
            raise ValueError(f"logical_len must be at least 0, got {self.logical_len}")
        for name in ("owned_positions", "host_indices"):
            tensor: torch.Tensor = getattr(self, name)
            if tensor.ndim != 1 or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
                raise ValueError(
                    f"{name} must be one-dimensional, int64 and on the CPU, got shape "
                    f"{tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}"
                )
        positions = self.owned_positions
        if len(positions) != len(self.host_indices):
            raise ValueError(
                "owned_positions and host_indices must be equally long, got "
                f"{len(positions)} and {len(self.host_indices)}"
            )
        if bool((positions[1:] <= positions[:-1]).any()):
            raise ValueError(
                f"owned_positions must be ascending, each once, got {positions.tolist()}"
            )
        # Ascending, so the ends bound them all.
        if len(positions) and not 0 <= int(positions[0]) <= int(positions[-1]) < self.logical_len:
            raise ValueError(
                f"owned_positions must lie in [0, {self.logical_len}), got {positions.tolist()}"
            )

    @classmethod
    def of(cls, host_pages: Sequence[int], layout: CpSharedKVLayout) -> CpHiCacheNodeMetadata:
        """The record of logical host pages, by their place in the span, for the layout's rank."""
        pages = torch.tensor(host_pages, dtype=torch.int64)
        rows, positions = layout.filter_owned_pages(pages, torch.arange(len(pages)))
        return cls(len(pages), positions, rows)

    def split(self, num_pages: int) -> tuple[CpHiCacheNodeMetadata, CpHiCacheNodeMetadata]:
        """(parent, child): the first `num_pages` pages and the rest, whose positions count from
        there. ValueError outside [0, logical_len]."""
        if not 0 <= num_pages <= self.logical_len:
            raise ValueError(f"split must be in [0, {self.logical_len}], got {num_pages}")
        cut = int(torch.searchsorted(self.owned_positions, num_pages))
        parent = CpHiCacheNodeMetadata(
            num_pages, self.owned_positions[:cut], self.host_indices[:cut]
        )
        child = CpHiCacheNodeMetadata(
            self.logical_len - num_pages,
            self.owned_positions[cut:] - num_pages,
            self.host_indices[cut:],
        )
        return parent, child
