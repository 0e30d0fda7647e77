"""Index keys in fp8 (e4m3), each with a float32 scale, as the pages of a cache hold them: a page's
keys first, its scales behind them. How keys and queries are quantised, and how keys are stored.
Knows no request and no cache.

A row's scale is the least power of two that brings its largest element to 448 or below. Such
scales change no digit of what they multiply: scores are those of the rounded rows exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from kernels.dispatch import gpu_kernels

E4M3: Final = torch.float8_e4m3fn
SCALE_BYTES: Final = 4
LEAST: Final = 1e-4  # what the largest element of a row counts as at least: zeros have a scale too


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Keys:
    """Rows of index keys: row r is row r % page_size of page r // page_size. With pages of one row
    each, a row is its elements, then its scale: so keys travel and so indexing returns them."""

    pages: torch.Tensor  # [num_pages, page_size · (dim + 4)] uint8
    page_size: int = 1

    @classmethod
    def quantised(cls, keys: torch.Tensor) -> Fp8Keys:
        """keys [L, dim], dim a multiple of 4 -> as many rows."""
        values, scales = quantise(keys)
        return cls(torch.cat((values.view(torch.uint8), scales.unsqueeze(1).view(torch.uint8)), 1))

    @property
    def dim(self) -> int:
        return self.pages.shape[1] // self.page_size - SCALE_BYTES

    @property
    def codes(self) -> torch.Tensor:
        """The elements' bytes, a view: [num_pages, page_size, dim] uint8."""
        codes = self.pages[:, : self.page_size * self.dim]
        return codes.view(len(codes), self.page_size, self.dim)

    @property
    def scales(self) -> torch.Tensor:
        """A view: [num_pages, page_size] float32."""
        return self.pages[:, self.page_size * self.dim :].view(torch.float32)

    def __len__(self) -> int:
        return len(self.pages) * self.page_size

    def __getitem__(self, rows: torch.Tensor | slice) -> Fp8Keys:
        """rows [n] int64, or a slice without a step -> n rows."""
        if isinstance(rows, slice):
            if self.page_size == 1:
                return Fp8Keys(self.pages[rows])
            rows = torch.arange(*rows.indices(len(self)), device=self.pages.device)
        page, place = rows // self.page_size, rows % self.page_size
        scales = self.scales[page, place].unsqueeze(1).view(torch.uint8)
        return Fp8Keys(torch.cat((self.codes[page, place], scales), dim=1))

    def dequantised(self) -> torch.Tensor:
        """[len, dim] float32"""
        wide = self.codes.view(E4M3).float() * self.scales.unsqueeze(2)
        return wide.flatten(0, 1)


IndexKeys: TypeAlias = torch.Tensor | Fp8Keys  # [rows, index_head_dim], as they are or in fp8


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> its rows in e4m3, [..., D], and their scales, [...] float32."""
    wide = x.float()
    bits = wide.abs().amax(dim=-1, keepdim=True).clamp_min(LEAST).view(torch.int32)
    # The exponent of the largest element over 448 = 1.75 · 2**8, one more where it exceeds 1.75.
    exponent = ((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    inverse = ((254 << 23) - exponent).view(torch.float32)
    return (wide * inverse).to(E4M3), exponent.view(torch.float32).squeeze(-1)


def quantise_queries(
    q: torch.Tensor,  # [T, index_n_heads, index_head_dim]
    weights: torch.Tensor,  # [T, index_n_heads] float32
) -> tuple[torch.Tensor, torch.Tensor]:  # e4m3, as q; float32, as weights
    """Queries by token and head; their scales are folded into the heads' weights."""
    values, scales = quantise(q)
    return values, weights * scales


def store_keys(
    cache: Fp8Keys,
    rows: torch.Tensor,  # [N] int64, distinct but for padding
    tokens: torch.Tensor | None,  # [N] int64: the source tokens; None: all T = N of them, in order
    keys: IndexKeys,  # [T, dim], or T rows already quantised, in pages of one
) -> None:
    """cache[rows[i]] = the key of token tokens[i]."""
    if isinstance(keys, torch.Tensor):
        if gpu_kernels(cache.pages, keys):
            from kernels.gpu import fp8 as gpu

            gpu.store_keys(cache, rows, tokens, keys)
            return
        keys = Fp8Keys.quantised(keys if tokens is None else keys[tokens])
    elif tokens is not None:
        keys = keys[tokens]
    page, place = rows // cache.page_size, rows % cache.page_size
    cache.codes[page, place] = keys.codes[:, 0]
    cache.scales[page, place] = keys.scales[:, 0]
