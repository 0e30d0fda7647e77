"""Triton's cache of compiled things with a second place behind it that is only read: the C module
that Triton would build on the spot, for an image that holds no compiler. Where the disk is full it
says what would help. Knows no kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from kernels.full_disk import full_disk_named

SHIPPED = Path(sys.prefix) / "share" / "plait" / "triton"


class TritonCache(FileCacheManager):  # type: ignore[misc] # triton is not typed
    def __init__(self, *args: Any, **options: Any) -> None:
        with full_disk_named(knobs.cache.dir, "TRITON_CACHE_DIR"):
            super().__init__(*args, **options)

    def get_file(self, filename: str) -> str | None:
        """The file's path in the cache, else among what was shipped; None: in neither."""
        found: str | None = super().get_file(filename)
        shipped = SHIPPED / self.key / filename
        return str(shipped) if found is None and shipped.is_file() else found

    def put(self, *args: Any, **options: Any) -> str:
        with full_disk_named(knobs.cache.dir, "TRITON_CACHE_DIR"):
            path: str = super().put(*args, **options)
            return path
