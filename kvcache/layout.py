"""What one token occupies in the cache: the geometry that pools, host tier and transfers share."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.fp8_keys import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Per-token widths, in elements, of one layer's rows. MLA models keep latent rows (latent KV
    followed by the rope key) and, with an indexer, index keys; GQA models keep k and v rows."""

    num_layers: int
    latent_dim: int = 0  # kv_lora_rank + qk_rope_head_dim
    index_dim: int = 0  # index_head_dim
    index_layers: tuple[int, ...] = ()  # layers that have an indexer of their own
    num_kv_heads: int = 0
    head_dim: int = 0
    fp8_index_keys: bool = False  # e4m3 and a float32 scale a row, whatever the cache's dtype

    def __post_init__(self) -> None:
        if self.num_layers <= 0:
            raise ValueError(f"num_layers must be positive, got {self.num_layers}")
        if (self.latent_dim > 0) == (self.num_kv_heads > 0):
            raise ValueError(
                f"exactly one of latent_dim ({self.latent_dim}) and num_kv_heads "
                f"({self.num_kv_heads}) must be positive"
            )
        if self.fp8_index_keys and self.index_dim % 16:
            raise ValueError(
                f"index_dim {self.index_dim}: keys in fp8 need a multiple of 16, so that scales "
                "and pages are aligned"
            )

    def index_row_bytes(self, itemsize: int) -> int:
        """Of one index key in a cache whose elements have `itemsize` bytes, its scale included."""
        return self.index_dim + SCALE_BYTES if self.fp8_index_keys else self.index_dim * itemsize

    def bytes_per_token(self, itemsize: int) -> int:
        """Over all layers."""
        kv = self.latent_dim or 2 * self.num_kv_heads * self.head_dim
        index = len(self.index_layers) * self.index_row_bytes(itemsize)
        return self.num_layers * kv * itemsize + index
