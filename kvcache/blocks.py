"""Which pages are read together when a sharded pool is streamed, and where each lies once the parts
of all ranks have been gathered. Host arithmetic on logical pages, the same on every rank but for
the rows that this one contributes. Knows contexts (lists of pages), no requests, no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.sharding import DUMMY_PAGE, CpSharedKVLayout


@dataclass(frozen=True, slots=True)
class Span:
    """The part of one context that lies in a block: tokens [begin, begin + len(rows))."""

    begin: int
    rows: torch.Tensor  # [n] int64 into the gathered block [cp_size * most * page_size, ...]


@dataclass(frozen=True, slots=True)
class Block:
    own: torch.Tensor  # [most] int64 row pages that this rank contributes, dummies behind
    most: int  # pages that each rank contributes: the largest count
    spans: tuple[Span | None, ...]  # by context; None: it has nothing in this block


def plan_blocks(
    contexts: Sequence[Sequence[int]],  # of each context its pages, by position
    lengths: Sequence[int],  # of each context its tokens, the last page perhaps in part
    layout: CpSharedKVLayout,
    pages_per_rank: int,  # that one rank contributes to one block, at most
    device: torch.device | str = "cpu",
) -> list[Block]:
    """The blocks that cover all contexts. A page that several contexts share is read once. A block
    ends where its next page would be one too many for the rank that owns it, so that what is
    gathered never exceeds cp_size * pages_per_rank pages, however unevenly they lie.

    Contexts share pages as a radix tree shares prefixes: where two have the same page, all before
    it are the same. So a context's pages in one block are neighbours. Raises ValueError where they
    are not, where a context has too few pages or names the dummy page, or pages_per_rank is not
    positive.
    """
    if pages_per_rank <= 0:
        raise ValueError(f"pages_per_rank must be positive, got {pages_per_rank}")
    used = [_used_pages(p, n, layout.page_size) for p, n in zip(contexts, lengths, strict=True)]
    places: dict[int, int] = {}  # page -> place in the order of reading
    for pages in used:
        for page in pages:
            places.setdefault(page, len(places))
    order = np.fromiter(places, dtype=np.int64, count=len(places))
    return [
        _block(pages, used, lengths, layout, device)
        for pages in _cut(order, layout, pages_per_rank)
    ]


def _cut(pages: np.ndarray, layout: CpSharedKVLayout, pages_per_rank: int) -> list[np.ndarray]:
    cuts: list[int] = []
    counts = [0] * layout.cp_size
    for place, owner in enumerate(layout.owner(pages).tolist()):
        if counts[owner] == pages_per_rank:
            cuts.append(place)
            counts = [0] * layout.cp_size
        counts[owner] += 1
    return [part for part in np.split(pages, cuts) if len(part)]


def _used_pages(pages: Sequence[int], length: int, page_size: int) -> list[int]:
    num_pages = -(-length // page_size)
    used = [int(page) for page in pages[:num_pages]]
    if len(used) < num_pages or DUMMY_PAGE in used:
        raise ValueError(f"{length} tokens need {num_pages} pages of {page_size}, got {used}")
    return used


def _block(
    pages: np.ndarray,
    used: Sequence[list[int]],
    lengths: Sequence[int],
    layout: CpSharedKVLayout,
    device: torch.device | str,
) -> Block:
    owners = layout.owner(pages)
    counts = np.bincount(owners, minlength=layout.cp_size)
    most = int(counts.max())
    ordinal = np.empty_like(pages)  # of each page among its owner's in this block
    for rank in range(layout.cp_size):
        ordinal[owners == rank] = np.arange(counts[rank])
    slots = dict(zip(pages.tolist(), (owners * most + ordinal).tolist(), strict=True))
    own = np.full(most, DUMMY_PAGE, dtype=np.int64)
    own[: counts[layout.cp_rank]] = layout.row_page(pages[owners == layout.cp_rank])
    spans = tuple(
        _span(context, length, slots, layout.page_size, device)
        for context, length in zip(used, lengths, strict=True)
    )
    return Block(torch.from_numpy(own).to(device), most, spans)


def _span(
    context: list[int],
    length: int,
    slots: dict[int, int],
    page_size: int,
    device: torch.device | str,
) -> Span | None:
    inside = [position for position, page in enumerate(context) if page in slots]
    if not inside:
        return None
    if inside != list(range(inside[0], inside[-1] + 1)):
        raise ValueError(f"the pages of one block are no neighbours in a context: {inside}")
    pages = np.array([slots[context[position]] for position in inside], dtype=np.int64)
    rows = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
    begin = inside[0] * page_size
    return Span(begin, torch.from_numpy(rows[: length - begin]).to(device))
