"""Whether this machine's own CPU kernels take a call: by device, dtype and what is installed."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

STORED = (torch.bfloat16, torch.float16, torch.float32)


def cpu_kernels(x: Tensor, *weights: Tensor) -> ModuleType | None:
    """kernels.cpu.calls if it can and should take this call, else None."""
    w = weights[0]
    if x.device.type != "cpu" or w.dtype not in STORED or any(t.dtype != w.dtype for t in weights):
        return None
    if x.dtype == w.dtype != torch.float32 and _torch_is_fast(x.dtype):
        return None
    return numba_kernels() if x.dtype in STORED else None


@functools.cache
def numba_kernels() -> ModuleType | None:
    if importlib.util.find_spec("numba") is None:
        return None
    from kernels.cpu import calls

    return calls


@functools.cache
def _torch_is_fast(dtype: torch.dtype) -> bool:
    """Whether the CPU multiplies this dtype in hardware, so that torch's product wins."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    flag = "avx512_bf16" if dtype == torch.bfloat16 else "avx512_fp16"
    return bool(torch.cpu.get_capabilities().get(flag, False))
