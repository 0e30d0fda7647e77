"""The map between logical pages and locs and the rows of one context-parallel rank.

Owns that bijection and nothing else: no buffers, no free lists, no requests. Every expression holds
for torch tensors and numpy arrays alike, so the module imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

DUMMY_PAGE = 0  # padding is written and read here; row page 0 on every rank

Array = TypeVar("Array", "torch.Tensor", "np.ndarray[Any, Any]")


@dataclass(frozen=True, slots=True)
class CpSharedKVLayout:
    """Page p >= 1 lies on rank (p - 1) mod cp_size, at row page (p - 1) div cp_size + 1.

    Page 0 is the dummy: nobody owns it and it is row page 0 everywhere. With one rank, rows are
    locs. Arrays are signed integers, of any shape where not said otherwise; values must be >= 0 and
    are not checked, as that would wait for the device.
    """

    page_size: int  # tokens
    cp_size: int = 1
    cp_rank: int = 0

    def __post_init__(self) -> None:
        if self.page_size <= 0:
            raise ValueError(f"page_size must be positive, got {self.page_size}")
        if self.cp_size <= 0:
            raise ValueError(f"cp_size must be positive, got {self.cp_size}")
        if not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(
                f"cp_rank must be in [0, cp_size), got {self.cp_rank} with cp_size {self.cp_size}"
            )

    def owner(self, pages: Array) -> Array:
        """Owning rank of each page, -1 for the dummy page. Same shape as `pages`."""
        # (0 - 1) mod N is N - 1: the dummy's correction by N leaves -1, without a branch.
        owner: Array = (pages - 1) % self.cp_size - self.cp_size * (pages == DUMMY_PAGE)
        return owner

    def row_page(self, pages: Array) -> Array:
        """Row page of each page on its owner. Same shape as `pages`."""
        return (pages - 1) // self.cp_size + 1  # floor division takes page 0 to 0

    def row(self, locs: Array) -> Array:
        """Row of each loc on its page's owner. Same shape as `locs`."""
        if self.cp_size == 1:
            return locs
        rows: Array = self.row_page(locs // self.page_size) * self.page_size + locs % self.page_size
        return rows

    def owned_by_this_rank(self, locs: Array) -> Array:
        """Which locs this rank stores: a boolean mask, same shape as `locs`."""
        return self._owned(locs // self.page_size)

    def filter_owned_pages(self, pages: Array, positions: Array) -> tuple[Array, Array]:
        """This rank's share of a page list: (row pages, positions), in the order given.

        `pages` and `positions` are both [num_pages]; a position is a page's place in its request.
        """
        if pages.ndim != 1 or pages.shape != positions.shape:
            raise ValueError(
                "pages and positions must be one-dimensional and equally long, got shapes "
                f"{tuple(pages.shape)} and {tuple(positions.shape)}"
            )
        owned = self._owned(pages)
        return self.row_page(pages[owned]), positions[owned]

    def logical_size(self, physical_size: int) -> int:
        """Tokens the group holds where each rank holds `physical_size`. The dummy page counts in
        neither; ValueError where `physical_size` is not whole pages."""
        self._check_aligned("physical_size", physical_size, self.page_size)
        return physical_size * self.cp_size

    def physical_size(self, logical_size: int) -> int:
        """Tokens a rank holds where the group holds `logical_size`. ValueError where the ranks'
        shares are not equal and whole pages."""
        self._check_aligned("logical_size", logical_size, self.page_size * self.cp_size)
        return logical_size // self.cp_size

    def check_sizes(self, logical_size: int, physical_size: int) -> None:
        """ValueError unless logical_size == physical_size * cp_size, both in whole pages."""
        if self.logical_size(physical_size) != logical_size:
            raise ValueError(
                f"logical_size must be physical_size {physical_size} * cp_size {self.cp_size} = "
                f"{physical_size * self.cp_size}, got {logical_size}"
            )

    def _owned(self, pages: Array) -> Array:
        owned: Array = (pages != DUMMY_PAGE) & ((pages - 1) % self.cp_size == self.cp_rank)
        return owned

    def _check_aligned(self, name: str, size: int, multiple: int) -> None:
        if size < 0 or size % multiple:
            raise ValueError(
                f"{name} must be a non-negative multiple of {multiple} tokens (page_size "
                f"{self.page_size}, cp_size {self.cp_size}), got {size}"
            )
