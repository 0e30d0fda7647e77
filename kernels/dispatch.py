"""The one place that chooses who takes a call, by device, dtype and what is installed: the CPU's
compiled kernels (kernels.cpu), the GPU's (kernels.gpu), or the torch form beside the port."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch import Tensor

from kernels.block_fp8 import Weight

STORED = (torch.bfloat16, torch.float16, torch.float32)

_log = logging.getLogger(__name__)


def cpu_kernels(x: Tensor, *weights: Weight) -> ModuleType | None:
    """kernels.cpu.calls if it can and should take this call, else None."""
    w = weights[0]
    if x.device.type != "cpu" or w.dtype not in STORED or any(t.dtype != w.dtype for t in weights):
        return None
    if x.dtype == w.dtype != torch.float32 and _torch_is_fast(x.dtype):
        return None
    return numba_kernels() if x.dtype in STORED else None


def gpu_kernels(*tensors: Tensor) -> bool:
    """Whether kernels.gpu, which Triton compiles, takes calls with these tensors: all of them on
    one CUDA device that it works on, numbers in 16 or 32 bits. A port that has to decline for
    another reason, a shape say, calls `fall_back`."""
    device = tensors[0].device
    if not _has_triton(device):
        return False
    fits = (
        t.device == device and (t.dtype in STORED or not t.is_floating_point()) for t in tensors
    )
    return all(fits)


@functools.cache
def keeps_block_fp8(device: torch.device) -> bool:
    """Whether kernels.gpu multiplies with weights in block fp8 there: tiles are copied by their
    descriptors, into more shared memory than cards outside these generations have."""
    if not _has_triton(device):
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def fall_back(kernel: str, why: str) -> None:
    """Say, once for each reason, that calls of `kernel` are computed in their torch form."""
    _log.warning("%s is computed by torch, which is slower: %s", kernel, why)


def compiling_ahead(device: torch.device) -> AbstractContextManager[None] | None:
    """In it, calls of the GPU's kernels on this device compile them, all at once, and compute
    nothing. None: nothing is compiled for this device on its first call."""
    if not _has_triton(device):
        return None
    from kernels.gpu.ahead import compiling

    return compiling()


def describe(device: torch.device) -> str:
    """Whose kernels calls on this device get, for the log."""
    if device.type == "cuda":
        index = device.index or 0
        card = torch.cuda.get_device_name(index)
        if _has_triton(device):
            return f"Triton {importlib.metadata.version('triton')} on {card}"
        major, minor = torch.cuda.get_device_capability(index)
        return f"torch on {card}: Triton is absent or the card (sm_{major}{minor}) older than sm_80"
    return "torch: numba is absent" if numba_kernels() is None else "numba"


def _has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and _triton_compiles(device.index or 0)


@functools.cache
def _triton_compiles(device_index: int) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device_index) >= (8, 0)


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
