"""How the products of the routed experts are cut, by how many pairs an expert has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton

from kernels.block_fp8 import BLOCK


@dataclass(frozen=True, slots=True)
class Tile:
    """How one of the products is cut."""

    rows: int  # pairs
    columns: int
    depth: int
    warps: int
    stages: int
    weights_first: bool  # the weights are the tensor cores' wide side, for few pairs an expert
    dequantises: bool = False  # weights in fp8 get their scales before the product, and rounded
    widens: bool = False  # weights in fp8 are 16-bit ones before the product begins

    @property
    def constants(self) -> dict[str, int | bool]:
        """As both products' kernels name them."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "WEIGHTS_FIRST": self.weights_first,
            "DEQUANTISES": self.dequantises,
            "STAGES": self.stages,
            "num_warps": self.warps,
        }


_MANY_PAIRS: Final = 96  # an expert, from which on the tensor cores are what is waited for
# Three bytes of traffic a weight are a fifth of the products' time at twice as many pairs, and half
# of it at half as many.
_WIDENED_FROM: Final = 512
WIDE: Final = (
    Tile(128, 128, 64, 8, 4, False, widens=True),
    Tile(128, 256, 64, 8, 4, False, widens=True),
)
# Weights come to the tensor cores by way of registers and shared memory: as their second side they
# are waited for once a step, as the first after each instruction. The conversion of `up` is beside
# the product of `gate`; of `down`, two programs share a processor.
FP8_IN_KERNEL: Final = (Tile(128, 128, 64, 8, 4, False, dequantises=True),) * 2


def most_row_tiles(num_pairs: int, num_experts: int, tile: Tile) -> int:
    """The most there can be: every expert's last tile may be all but empty."""
    return min(num_pairs, num_pairs // tile.rows + min(num_experts, num_pairs))


def tiles_for(
    num_pairs: int, num_experts: int, dtype: torch.dtype, weights: torch.dtype
) -> tuple[Tile, Tile]:
    if dtype == torch.float32:
        return (Tile(16, 32, 32, 4, 2, False),) * 2
    per_expert = num_pairs // num_experts
    is_fp8 = weights == torch.float8_e4m3fn
    if is_fp8 and _MANY_PAIRS <= per_expert < _WIDENED_FROM:
        return FP8_IN_KERNEL
    if per_expert >= _MANY_PAIRS:
        return WIDE  # also of plain weights, of which there is nothing to widen
    stages = 4 if is_fp8 else 3
    if per_expert <= 8:
        return Tile(16, 64, BLOCK, 4, stages, True), Tile(16, 128, BLOCK, 4, stages, True)
    rows = min(64, triton.next_power_of_2(2 * per_expert))
    return (Tile(rows, 64, BLOCK, 4, 4 if rows < 64 else 3, True),) * 2
