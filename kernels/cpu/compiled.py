"""numba's decorators, typed, with the settings all CPU kernels share. Imports numba only after its
environment is prepared, so kernels take the decorators from here and never from numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kernels.cpu.threads import prepare_numba

prepare_numba()

from numba import njit, prange  # noqa: E402
from numba.core.cpu import ParallelOptions  # noqa: E402

__all__ = ["compiled", "compiled_parallel", "prange"]

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compiled at its first call for the argument types it gets, and kept on disk."""
    out: F = njit(cache=True, nogil=True)(function)
    return out


def compiled_parallel(function: F) -> F:
    """As `compiled`; its `prange` loops, and nothing else, run on the thread pool one by one.

    Fusion must stay off: the loops hand data over through addresses, which numba cannot see.
    """
    # A dictionary of options would be emptied by the first compilation: the next one would fuse.
    options = ParallelOptions({"prange": True, "fusion": False})
    out: F = njit(cache=True, nogil=True, parallel=options)(function)
    return out
