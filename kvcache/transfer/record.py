"""What one pool tells another so that pages can be written into it: a value, sent as it is.

Owns what two pools must have in common. Knows no tensor, no socket and no request.
"""

from __future__ import annotations

import msgspec


class BufferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One of a pool's buffers. Row page p of layer l lies at
    address + l * layer_bytes + p * page_bytes."""

    name: str  # latent, keys, values or index_keys
    dtype: str  # as torch prints it, without "torch."; index keys in fp8 have scales in their pages
    address: int
    num_layers: int
    layer_bytes: int  # from one layer's row page 0 to the next's
    page_bytes: int  # of one page in one layer


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    page_size: int  # tokens
    num_row_pages: int  # row page 0, the dummy, included
    buffers: tuple[BufferRecord, ...]

    @property
    def page_bytes(self) -> int:
        """Of one page over all buffers and layers."""
        return sum(buffer.num_layers * buffer.page_bytes for buffer in self.buffers)

    def geometry(self) -> str:
        """For people: what must be equal on both sides, and nothing else."""
        rows = (
            f"{b.name} {b.num_layers} x {b.page_bytes} bytes of {b.dtype}" for b in self.buffers
        )
        return f"page_size {self.page_size}, {', '.join(rows)}"


def mismatch(ours: PoolRecord, theirs: PoolRecord) -> str:
    """Why pages of one pool do not fit the other; empty where they do."""
    if ours.geometry() == theirs.geometry():
        return ""
    return f"the pools differ: here [{ours.geometry()}], there [{theirs.geometry()}]"
