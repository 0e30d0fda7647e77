"""Kernels compiled before they are needed, many at once: a forward would wait for each in turn.
Knows no kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

# The compiler holds Python's lock for a sixth of its time; more threads would wait for that.
_MOST_THREADS: Final = 16
_ALLOCATE: Final = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class _Zeroed(TorchFunctionMode):
    """What kernels do not write is 0, as torch's operations may index with it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _ALLOCATE else out


@contextmanager
def compiling() -> Iterator[None]:
    """Kernels that are called in here compute nothing, but are compiled when it is left. One that
    cannot be raises where it is called next."""
    run: Callable[..., Any] = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, warmup=True, **options)

    threads = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    try:
        with triton.AsyncCompileMode(threads, ignore_errors=True):
            JITFunction.run = compile_only
            try:
                with _Zeroed():
                    yield
            finally:
                JITFunction.run = run
    finally:
        threads.shutdown(cancel_futures=True)  # of a start that is broken off
