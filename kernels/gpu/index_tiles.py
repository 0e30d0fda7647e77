"""How the index scores are cut, by heads, key dimensions and their type, and by the card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton

from kernels.gpu.card import Card

_KEYS: Final = 64  # of one product
_OTHER_BYTES: Final = 8 << 10  # of a program's shared memory: what is not keys or queries


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut."""

    queries: int  # of a program
    keys: int  # of one product
    span: int  # positions of a program
    warps: int
    stages: int

    def constants(self, heads: int, dim: int, page_size: int) -> dict[str, int | bool]:
        """As both kernels name them."""
        wide = _padded_dim(dim)
        return {
            "HEADS": _padded_heads(heads),
            "DIM": wide,
            "KEYS": self.keys,
            "PAGE": page_size,
            "WITHIN_PAGE": page_size % self.keys == 0,
            "EVEN_DIM": dim == wide,
            "STAGES": self.stages,
            "num_warps": self.warps,
        }


def causal_tile(heads: int, dim: int, dtype: torch.dtype, card: Card) -> Tile:
    """128 columns leave registers for three programs a multiprocessor, one of which multiplies
    while the others sum. Of 8 bits Hopper takes 256 and more blocks ahead: keys are read half as
    often."""
    wide, row = _padded_heads(heads), _padded_dim(dim) * dtype.itemsize
    columns, stages = 64 if dtype == torch.float32 else 128, 3
    if row <= 128 and card.capability == 9:
        columns, stages = 256, 6
    while columns > wide and _stages(2, columns, row, card) < 2:
        columns //= 2
    columns = max(columns, wide)
    return Tile(columns // wide, _KEYS, 4096, 4, _stages(stages, columns, row, card))


def paged_tile(num: int, heads: int, dim: int, dtype: torch.dtype, card: Card) -> Tile:
    """Few requests are cut finer, so that every multiprocessor has something to read."""
    row = _padded_dim(dim) * dtype.itemsize
    stages = 8 if row <= 128 else 6 if row <= 256 else 3
    span = 128 if num < 4 else 512 if num < 64 else 1024
    return Tile(1, _KEYS, span, 4, _stages(stages, _padded_heads(heads), row, card))


def _stages(most: int, columns: int, row_bytes: int, card: Card) -> int:
    """So many blocks of keys at a time, one of them in registers, fit beside the queries."""
    left = card.shared_bytes - columns * row_bytes - _OTHER_BYTES
    return max(1, min(most, 1 + left // (_KEYS * row_bytes)))


def _padded_heads(heads: int) -> int:
    return int(triton.next_power_of_2(max(heads, 16)))


def _padded_dim(dim: int) -> int:
    return int(triton.next_power_of_2(max(dim, 32)))  # which tensor cores take of 8 bits at least
