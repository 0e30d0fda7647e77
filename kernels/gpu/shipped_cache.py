"""Triton's cache of compiled things with a second place behind it that is only read: the C module
that Triton would build on the spot, for an image that holds no compiler. Knows no kernel.

Triton takes it from TRITON_CACHE_MANAGER=kernels.gpu.shipped_cache:ShippedCache."""

from __future__ import annotations

import sys
from pathlib import Path

from triton.runtime.cache import FileCacheManager

SHIPPED = Path(sys.prefix) / "share" / "plait" / "triton"


class ShippedCache(FileCacheManager):  # type: ignore[misc] # triton is not typed
    def get_file(self, filename: str) -> str | None:
        """The file's path in the cache, else among what was shipped; None: in neither."""
        found: str | None = super().get_file(filename)
        shipped = SHIPPED / self.key / filename
        return str(shipped) if found is None and shipped.is_file() else found
