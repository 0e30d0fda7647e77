"""How the products of the routed experts are cut, by how many pairs an expert has."""

from __future__ import annotations

from dataclasses import dataclass

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


def most_row_tiles(num_pairs: int, num_experts: int, tile: Tile) -> int:
    """The most there can be: every expert's last tile may be all but empty."""
    return min(num_pairs, num_pairs // tile.rows + min(num_experts, num_pairs))


def tiles_for(
    num_pairs: int, num_experts: int, dtype: torch.dtype, weights: torch.dtype
) -> tuple[Tile, Tile]:
    if dtype == torch.float32:
        return (Tile(16, 32, 32, 4, 2, False),) * 2
    per_expert = num_pairs // num_experts
    if weights == torch.float8_e4m3fn:
        return _fp8_tiles(per_expert)
    if per_expert >= 96:
        return Tile(128, 128, 64, 8, 4, False), Tile(128, 256, 64, 8, 4, False)
    if per_expert <= 8:
        return Tile(16, 64, 128, 4, 3, True), Tile(16, 128, 128, 4, 3, True)
    rows = min(64, triton.next_power_of_2(2 * per_expert))
    return (Tile(rows, 64, 128, 4, 4 if rows < 64 else 3, True),) * 2


def _fp8_tiles(per_expert: int) -> tuple[Tile, Tile]:
    """Weights are the wide side for many pairs, too: registers, where they are widened, are where
    tensor cores take that side from."""
    if per_expert >= 96:
        return (Tile(128, 128, 64, 8, 3, True, True),) * 2
    if per_expert <= 8:
        return Tile(16, 64, BLOCK, 4, 4, True), Tile(16, 128, BLOCK, 4, 4, True)
    rows = min(64, triton.next_power_of_2(2 * per_expert))
    return (Tile(rows, 64, BLOCK, 4, 4 if rows < 64 else 3, True),) * 2
