"""Normalisation over the last dimension, with float32 statistics whatever the input's dtype."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.dispatch import cpu_kernels, gpu_kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight; x [..., D], weight [D] -> like x (Zhang and Sennrich,
    Root Mean Square Layer Normalization)."""
    if x.dtype == weight.dtype == torch.float32 and cpu_kernels(x, weight) is not None:
        from kernels.cpu import norm as cpu

        out: torch.Tensor = cpu.rms_norm(x, weight.contiguous(), eps)
        return out
    if gpu_kernels(x, weight):
        from kernels.gpu import norm as gpu

        return gpu.rms_norm(x, weight, eps)
    wide = x.float()
    # mean(x²) from one fused norm: half the operations of square, mean, add and rsqrt in turn.
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(norm.square_().mul_(1.0 / x.shape[-1]).add_(eps))
    return (wide * scale).to(x.dtype) * weight


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """(x − mean) / sqrt(var + eps) · weight + bias; x [..., D], weight and bias [D] -> like x."""
    takes = x.dim() == 2 and x.stride(1) == 1 and x.dtype == weight.dtype == torch.float32
    if takes and cpu_kernels(x, weight, bias) is not None:
        from kernels.cpu import norm as cpu

        out: torch.Tensor = cpu.layer_norm(x, weight.contiguous(), bias.contiguous(), eps)
        return out
    if gpu_kernels(x, weight, bias):
        from kernels.gpu import norm as gpu

        return gpu.layer_norm(x, weight, bias, eps)
    return functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(
        x.dtype
    )
