"""Weights in fp8 (e4m3) with a float32 scale for each block of 128 x 128, as DeepSeek-V3 publishes
them: the value that stands for such a matrix, or for one of each expert. Knows no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

BLOCK: Final = 128


@dataclass(frozen=True, slots=True, eq=False)
class BlockFp8:
    """What a Tensor [.., N, K] of weights may be instead: has of its attributes those that callers
    of `linear` and `moe` look at."""

    codes: Tensor  # [.., N, K] e4m3
    scales: Tensor  # [.., ceil(N / BLOCK), ceil(K / BLOCK)] float32

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> BlockFp8:
        *outer, rows, columns = shape
        grid = (*outer, -(-rows // BLOCK), -(-columns // BLOCK))
        return cls(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(grid, dtype=torch.float32, device=device),
        )

    @classmethod
    def quantised(cls, w: Tensor) -> BlockFp8:
        """The largest weight of each block becomes the largest code."""
        out = cls.empty(*w.shape, device=w.device)
        rows, columns = w.shape[-2:]
        padded = functional.pad(w.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        grid = out.scales.shape
        blocks = padded.view(*grid[:-1], BLOCK, grid[-1], BLOCK)
        most = blocks.abs().amax(dim=(-3, -1)).clamp_min(torch.finfo(torch.float32).tiny)
        out.scales.copy_(most / torch.finfo(torch.float8_e4m3fn).max)
        codes = blocks / out.scales[..., :, None, :, None]
        out.codes.copy_(codes.reshape(padded.shape)[..., :rows, :columns])
        return out

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, key: int | slice) -> BlockFp8:
        """An expert's matrix of [E, N, K]; rows of [N, K], from the beginning of a block on."""
        if isinstance(key, int):
            return BlockFp8(self.codes[key], self.scales[key])
        begin, end, _ = key.indices(len(self.codes))
        if begin % BLOCK:
            raise ValueError(f"row {begin} is not the first one of a block of {BLOCK}")
        return BlockFp8(self.codes[begin:end], self.scales[begin // BLOCK : -(-end // BLOCK)])

    def view(self, *shape: int) -> BlockFp8:
        """[E · N, K] as [E, N, K], where E is not one N a multiple of BLOCK."""
        scales = self.scales.view(*shape[:-2], -1, self.scales.shape[-1])
        return BlockFp8(self.codes.view(shape), scales)

    def to(self, dtype: torch.dtype) -> Tensor:
        """[.., N, K], see `widen`."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        widen(self.codes, self.scales, out)
        return out


def widen(
    codes: Tensor,  # [.., N, K] e4m3
    scales: Tensor,  # [.., ceil(N / rows), ceil(K / columns)]
    out: Tensor,  # [.., N, K] floats
    block: tuple[int, int] = (BLOCK, BLOCK),  # rows, columns
) -> None:
    """Each weight is the product of its code and its block's scale, rounded once."""
    rows, columns = block
    wide = torch.promote_types(out.dtype, torch.float32)
    # One row of blocks at a time: the products of a whole matrix are never held.
    for i in range(scales.shape[-2]):
        part = slice(i * rows, (i + 1) * rows)
        own = scales[..., i : i + 1, :].to(wide).repeat_interleave(columns, -1)
        out[..., part, :] = codes[..., part, :].to(wide) * own[..., : codes.shape[-1]]


Weight: TypeAlias = Tensor | BlockFp8
