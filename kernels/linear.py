"""Matrix products with weights in 16 or 32 bits, or in block fp8: chooses the implementation by
device and dtype.

Knows no model. The CPU's own kernels (numba) are in kernels.cpu; where numba is absent, and on
every other device, torch computes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import dispatch
from kernels.block_fp8 import BlockFp8, Weight
from kernels.dispatch import STORED, cpu_kernels, gpu_kernels, keeps_block_fp8
from kernels.norm import rms_norm

_EXPAND_ROWS = 4096  # weight rows expanded to fp32 at a time by the fallback


def linear(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """x [.., K] times w [N, K] transposed, plus bias [N] -> [.., N] in x.dtype.

    Products are summed in fp32 at least. On the CPU with numba, and w in bf16, fp16 or fp32, a
    row's result depends on that row, w and K alone: not on the other rows, their number, or the
    number of threads. torch's products, used elsewhere, promise no such thing.
    Raises ValueError where the shapes do not fit.
    """
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"x {list(x.shape)} and w {list(w.shape)} differ in their last dimension")
    if (cpu := cpu_kernels(x, w)) is not None:
        out: Tensor = cpu.linear(x, w)
    elif isinstance(w, BlockFp8):
        out = _linear_fp8(x, w)
    elif x.dtype == w.dtype:
        return functional.linear(x, w, bias)
    else:
        out = _linear_by_slices(x, w)
    return out if bias is None else out.add_(bias)


def add_linear_(h: Tensor, x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """h [.., N] += linear(x, w, bias), in place where h is contiguous; h is returned."""
    if h.dtype == torch.float32 and (cpu := cpu_kernels(x, w)) is not None and h.is_contiguous():
        cpu.add_linear_(h, x, w)
        return h if bias is None else h.add_(bias)
    if bias is None and _adds_in_product(h, x, w):
        if not isinstance(w, BlockFp8):
            return h.addmm_(x, w.t())
        if h.is_contiguous():
            from kernels.gpu import block_fp8

            return block_fp8.linear(x, w, h)
    return h.add_(linear(x, w, bias))


def _adds_in_product(h: Tensor, x: Tensor, w: Weight) -> bool:
    """Whether a GPU's product can add to what is there, in one pass and with one rounding."""
    if h.dim() != 2 or h.dtype != x.dtype:
        return False
    if isinstance(w, BlockFp8):
        return _on_gpu_in_fp8(x, w)
    return x.dtype == w.dtype and gpu_kernels(h, x, w)


def _on_gpu_in_fp8(x: Tensor, w: BlockFp8) -> bool:
    return x.element_size() == 2 and keeps_block_fp8(x.device) and w.shape[1] % 16 == 0


def _linear_fp8(x: Tensor, w: BlockFp8) -> Tensor:
    if not _on_gpu_in_fp8(x, w):
        return _linear_by_slices(x, w)
    from kernels.gpu import block_fp8

    return block_fp8.linear(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[0])


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, w: Weight, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """rms_norm(x, norm, eps) [.., K], and linear of it with w [N, K] and bias -> [.., N]."""
    if x.dtype == norm.dtype == torch.float32 and (cpu := cpu_kernels(x, w)) is not None:
        normed, out = cpu.norm_linear(x, norm, eps, w)
        return normed, out if bias is None else out.add_(bias)
    normed = rms_norm(x, norm, eps)
    return normed, linear(normed, w, bias)


def add_swiglu_(h: Tensor, norm: Tensor, eps: float, w_gate_up: Weight, w_down: Weight) -> Tensor:
    """h [.., H] += swiglu_mlp(rms_norm(h), w_gate_up, w_down), in place; h is returned."""
    cpu = cpu_kernels(h, w_gate_up, w_down) if h.is_contiguous() else None
    if cpu is not None and h.dtype == norm.dtype == torch.float32:
        cpu.add_swiglu_(h, norm, eps, w_gate_up, w_down)
        return h
    if _adds_in_product(h, h, w_gate_up):
        from kernels.gpu.swiglu import silu_mul

        gated = silu_mul(linear(rms_norm(h, norm, eps), w_gate_up))
        return add_linear_(h, gated, w_down)
    return h.add_(swiglu_mlp(rms_norm(h, norm, eps), w_gate_up, w_down))


def swiglu_mlp(x: Tensor, w_gate_up: Weight, w_down: Weight) -> Tensor:
    """(silu(x · gate) * (x · up)) · down: x [.., H], w_gate_up [2I, H] (gate first), w_down [H, I]
    -> [.., H] in x.dtype. Batch invariant where `linear` is."""
    if w_gate_up.shape != (2 * w_down.shape[1], x.shape[-1]) or w_down.shape[0] != x.shape[-1]:
        raise ValueError(
            f"x {list(x.shape)} needs w_gate_up [2I, H] and w_down [H, I], "
            f"got {list(w_gate_up.shape)} and {list(w_down.shape)}"
        )
    if (cpu := cpu_kernels(x, w_gate_up, w_down)) is not None:
        out: Tensor = cpu.swiglu_mlp(x, w_gate_up, w_down)
        return out
    gate_up = linear(x, w_gate_up)
    if gpu_kernels(gate_up):
        from kernels.gpu.swiglu import silu_mul

        return linear(silu_mul(gate_up), w_down)
    gate, up = gate_up.chunk(2, dim=-1)
    return linear(functional.silu(gate) * up, w_down)


def fast_bf16_available() -> bool:
    """Whether bf16 weights are at least as fast as fp32 ones on this machine's CPU, activations
    being fp32: true where numba is installed (they halve the memory that a decode step reads)."""
    return dispatch.numba_kernels() is not None


def warm_up(dtypes: tuple[torch.dtype, ...]) -> None:
    """Compile, or load from the cache, the CPU kernels for weights of these dtypes; without it the
    first call of each pays (about a minute for the very first, 0.5 s from the cache)."""
    if (cpu := dispatch.numba_kernels()) is not None:
        cpu.warm_up(tuple(dtype for dtype in dtypes if dtype in STORED))


def _linear_by_slices(x: Tensor, w: Weight) -> Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)
    parts = [
        functional.linear(x.to(compute), w[low : low + _EXPAND_ROWS].to(compute))
        for low in range(0, w.shape[0], _EXPAND_ROWS)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return out.to(x.dtype)
