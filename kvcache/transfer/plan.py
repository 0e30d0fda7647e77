"""From pages of one pool to pages of another: which bytes go where. Pure, but for registering.

Row pages on both sides; who owns them and why they travel is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache.transfer.base import Addresses, TransferEngine, Writes
from kvcache.transfer.record import PoolRecord, mismatch


def plan_writes(
    ours: PoolRecord,
    theirs: PoolRecord,
    our_row_pages: Sequence[int] | npt.NDArray[np.int64],  # [num_pages]
    their_row_pages: Sequence[int] | npt.NDArray[np.int64],  # [num_pages]
) -> Writes:
    """The writes that copy our_row_pages[i] to their_row_pages[i] in every buffer and layer, pages
    that are adjacent on both sides as one. In order of buffer, layer and our pages.

    Raises ValueError where the pools differ, the lists are not equally long, a page is not in
    [1, num_row_pages) of its pool, or one of theirs would be written twice.
    """
    if reason := mismatch(ours, theirs):
        raise ValueError(reason)
    source = np.asarray(our_row_pages, dtype=np.int64)
    destination = np.asarray(their_row_pages, dtype=np.int64)
    if source.ndim != 1 or source.shape != destination.shape:
        raise ValueError(
            "as many pages must be given on both sides, got shapes "
            f"{source.shape} here and {destination.shape} there"
        )
    _check_range("our", source, ours.num_row_pages)
    _check_range("their", destination, theirs.num_row_pages)
    order = np.argsort(source, kind="stable")
    source, destination = source[order], destination[order]
    _check_unique(destination)
    # Where one page follows the other on both sides, the same run continues.
    breaks = (np.diff(source) != 1) | (np.diff(destination) != 1)
    starts = np.flatnonzero(np.concatenate(([True], breaks)))[: len(source)]
    lengths = np.diff(np.append(starts, len(source)))
    source, destination = source[starts], destination[starts]

    columns: list[tuple[Addresses, Addresses, Addresses]] = []
    for here, there in zip(ours.buffers, theirs.buffers, strict=True):
        layers = np.arange(here.num_layers, dtype=np.int64)[:, None]
        columns.append(
            (
                (here.address + layers * here.layer_bytes + source * here.page_bytes).ravel(),
                (
                    there.address + layers * there.layer_bytes + destination * here.page_bytes
                ).ravel(),
                np.tile(lengths * here.page_bytes, here.num_layers),
            )
        )
    sources, destinations, sizes = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Writes(sources, destinations, sizes)


def register_pool(engine: TransferEngine, record: PoolRecord) -> None:
    """Let the engine read and write all of a pool. Raises TransferError where that is refused."""
    for buffer in record.buffers:
        engine.register(buffer.address, buffer.num_layers * buffer.layer_bytes)


def _check_range(whose: str, row_pages: Addresses, num_row_pages: int) -> None:
    outside = row_pages[(row_pages < 1) | (row_pages >= num_row_pages)]
    if outside.size:
        raise ValueError(
            f"{whose} row page {outside[0]} is outside the pool; accepted: 1 to {num_row_pages - 1}"
        )


def _check_unique(destination: Addresses) -> None:
    pages, counts = np.unique(destination, return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"their row page {pages[counts > 1][0]} is wanted twice; a page is written once"
        )
