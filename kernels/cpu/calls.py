"""Tensors in, tensors out: hands the tensors' addresses to the compiled kernels.

Addresses and not arrays, because numpy knows no bf16 and unpacking an array costs a microsecond.
Shapes are checked by the callers in kernels.linear and kernels.moe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu import attention, experts, gemm, norm
from kernels.cpu.tile import BF16, FP16, FP32

_KINDS = {torch.bfloat16: (BF16, 2), torch.float16: (FP16, 2), torch.float32: (FP32, 4)}
_THREAD_WORK = 16_384  # multiply-adds below which waking another thread costs more than it saves


def linear(x: Tensor, w: Tensor) -> Tensor:
    rows = _rows(x)
    num_cols, k = w.shape
    out = torch.empty((*x.shape[:-1], num_cols), dtype=torch.float32)
    if k == 0:
        out.zero_()
    elif out.numel():
        w = w if w.stride(1) == 1 else w.contiguous()
        kind, size = _KINDS[w.dtype]
        num_threads = _num_threads(rows.shape[0] * num_cols * k)
        work = torch.empty(num_threads * gemm.PANEL_FLOATS)
        gemm.linear(
            kind, size, rows.data_ptr(), rows.stride(0), rows.shape[0], w.data_ptr(), w.stride(0),
            num_cols, k, out.data_ptr(), work.data_ptr(), num_threads,
        )  # fmt: skip
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def swiglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    rows = _rows(x)
    hidden, inner = w_down.shape
    out = torch.empty(x.shape, dtype=torch.float32)
    if out.numel() and inner:
        w_gate_up, w_down = w_gate_up.contiguous(), w_down.contiguous()
        kind, size = _KINDS[w_down.dtype]
        num_threads = torch.get_num_threads()
        work = torch.empty(num_threads * gemm.PANEL_FLOATS + 2 * rows.shape[0] * inner)
        experts.swiglu(
            kind, size, rows.data_ptr(), rows.stride(0), rows.shape[0], w_gate_up.data_ptr(),
            w_down.data_ptr(), hidden, inner, out.data_ptr(), work.data_ptr(), num_threads,
        )  # fmt: skip
    else:
        out.zero_()
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def moe(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    rows = _rows(x)
    num_experts, hidden, inner = w2.shape
    out = torch.empty(x.shape, dtype=torch.float32)
    if out.numel() and inner and topk_ids.numel():
        w13, w2 = w13.contiguous(), w2.contiguous()
        kind, size = _KINDS[w2.dtype]
        num_threads = torch.get_num_threads()
        work = torch.empty(
            num_threads * gemm.PANEL_FLOATS
            + topk_ids.numel() * (hidden + (1 + num_threads) * inner)
        )
        experts.moe(
            kind, size, rows.data_ptr(), rows.stride(0), w13.data_ptr(), w2.data_ptr(), hidden,
            inner, num_experts, topk_ids.reshape(-1).numpy(),
            topk_weights.reshape(-1).float().numpy(), topk_ids.shape[1], out.data_ptr(),
            work.data_ptr(), num_threads,
        )  # fmt: skip
    else:
        out.zero_()
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def warm_up(dtypes: tuple[torch.dtype, ...]) -> None:
    """Compile (or load from the cache) every kernel for weights of these dtypes."""
    for dtype in dtypes:
        x = torch.ones(2, 8)
        w = torch.ones(2, 16, 8, dtype=dtype)
        linear(x, w[0])
        swiglu_mlp(x, w[0], w[0, :8])
        moe(x, w, w[:, :8], torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    attention.warm_up(dtypes)
    norm.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)


def _rows(x: Tensor) -> Tensor:
    """x as fp32 [num_rows, K] whose rows are contiguous."""
    if x.dtype != torch.float32:
        x = x.float()
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _num_threads(work: int) -> int:
    return min(torch.get_num_threads(), 1 + work // _THREAD_WORK)
