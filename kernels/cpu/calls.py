"""Tensors in, tensors out: hands the tensors' addresses to the compiled kernels.

Addresses and not arrays, because numpy knows no bf16 and unpacking an array costs a microsecond.
Shapes are checked by the callers in kernels.linear and kernels.moe.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kernels.cpu import attention, experts, gemm, norm, rope, route, store, threads
from kernels.cpu.tile import BF16, FP16, FP32

log = logging.getLogger("plait.kernels")

_KINDS = {torch.bfloat16: (BF16, 2), torch.float16: (FP16, 2), torch.float32: (FP32, 4)}
_THREAD_WORK = 16_384  # multiply-adds below which waking another thread costs more than it saves


def linear(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty((*x.shape[:-1], w.shape[0]), dtype=torch.float32)
    _multiply(x, 0, 0.0, 0, w, out, True)
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def add_linear_(out: Tensor, x: Tensor, w: Tensor) -> None:
    """out += x · wᵀ; out fp32 and contiguous."""
    _multiply(x, 0, 0.0, 0, w, out, False)


def norm_linear(x: Tensor, norm: Tensor, eps: float, w: Tensor) -> tuple[Tensor, Tensor]:
    """x and norm fp32."""
    normed = torch.empty(x.shape, dtype=torch.float32)
    out = torch.empty((*x.shape[:-1], w.shape[0]), dtype=torch.float32)
    _multiply(x, norm.data_ptr(), eps, normed.data_ptr(), w, out, True)
    return normed, out


def _multiply(
    x: Tensor, norm: int, eps: float, normed: int, w: Tensor, out: Tensor, fresh: bool
) -> None:
    num_cols, k = w.shape
    if k == 0:
        if fresh:
            out.zero_()
    elif out.numel():
        rows = _rows(x)
        num_rows = rows.shape[0]
        w = w if w.stride(1) == 1 else w.contiguous()
        kind, size = _KINDS[w.dtype]
        num_threads = _num_threads(num_rows * num_cols * k)
        work = torch.empty(num_threads * gemm.PANEL_FLOATS + num_rows * k)
        gemm.linear(
            kind, size, rows.data_ptr(), rows.stride(0), num_rows, norm, eps, normed, w.data_ptr(),
            w.stride(0), num_cols, k, out.data_ptr(), int(fresh), work.data_ptr(), num_threads,
        )  # fmt: skip


def swiglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32)
    _swiglu(x, 0, 0.0, w_gate_up, w_down, out, True)
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def add_swiglu_(h: Tensor, norm: Tensor, eps: float, w_gate_up: Tensor, w_down: Tensor) -> None:
    """h += mlp(rms_norm(h)); h fp32 and contiguous, norm fp32."""
    _swiglu(h, norm.data_ptr(), eps, w_gate_up, w_down, h, False)


def _swiglu(
    x: Tensor, norm: int, eps: float, w_gate_up: Tensor, w_down: Tensor, out: Tensor, fresh: bool
) -> None:
    hidden, inner = w_down.shape
    if out.numel() and inner:
        rows = _rows(x)
        num_rows = rows.shape[0]
        w_gate_up, w_down = w_gate_up.contiguous(), w_down.contiguous()
        kind, size = _KINDS[w_down.dtype]
        num_threads = torch.get_num_threads()
        work = torch.empty(num_threads * gemm.PANEL_FLOATS + num_rows * (hidden + 2 * inner))
        experts.swiglu(
            kind, size, rows.data_ptr(), rows.stride(0), num_rows, norm, eps,
            w_gate_up.data_ptr(), w_down.data_ptr(), hidden, inner, out.data_ptr(), int(fresh),
            work.data_ptr(), num_threads,
        )  # fmt: skip
    elif fresh:
        out.zero_()


def moe(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32)
    _moe(x, w13, w2, topk_ids, topk_weights, None, out, True)
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def add_moe_(
    out: Tensor, x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor,
    shared: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """out += routed experts + shared experts; out fp32 and contiguous."""
    _moe(x, w13, w2, topk_ids, topk_weights, shared, out, False)


def _moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor,
    shared: tuple[Tensor, Tensor] | None, out: Tensor, fresh: bool,
) -> None:  # fmt: skip
    num_experts, hidden, inner = w2.shape
    if not (out.numel() and inner and topk_ids.numel()):
        if fresh:
            out.zero_()
        if shared is not None:
            _swiglu(x, 0, 0.0, *shared, out, False)
        return
    rows = _rows(x)
    num_rows, num_pairs = rows.shape[0], topk_ids.numel()
    w13, w2 = w13.contiguous(), w2.contiguous()
    kind, size = _KINDS[w2.dtype]
    num_threads = torch.get_num_threads()
    shared13 = shared2 = shared_inner = 0
    if shared is not None:
        shared13, shared2, shared_inner = *(t.data_ptr() for t in shared), shared[1].shape[1]
    work = torch.empty(
        num_threads * gemm.PANEL_FLOATS
        + num_rows * (hidden + 2 * shared_inner)
        + num_pairs * (hidden + (1 + num_threads) * inner)
    )
    experts.moe(
        kind, size, rows.data_ptr(), rows.stride(0), w13.data_ptr(), w2.data_ptr(), hidden,
        inner, num_experts, topk_ids.reshape(-1).numpy(),
        topk_weights.reshape(-1).float().numpy(), topk_ids.shape[1], shared13, shared2,
        shared_inner, out.data_ptr(), int(fresh), work.data_ptr(), num_threads,
    )  # fmt: skip


def warm_up(dtypes: tuple[torch.dtype, ...]) -> None:
    """Compile (or load from the cache) every kernel for weights of these dtypes."""
    if threads.is_cache_empty():
        log.info("compiling the CPU kernels, once: about a minute of processor time")
    for dtype in dtypes:
        x = torch.ones(2, 8)
        w = torch.ones(2, 16, 8, dtype=dtype)
        linear(x, w[0])
        norm_linear(x, x[0], 1e-6, torch.ones(2, 8))  # a router is fp32
        swiglu_mlp(x, w[0], w[0, :8])
        moe(x, w, w[:, :8], torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    attention.warm_up(dtypes)
    x, one = torch.ones(2, 8), torch.ones(8)
    norm.rms_norm(x, one, 1e-6)
    norm.layer_norm(x, one, one, 1e-6)
    route.sigmoid_gate(x, one, 1, True, 1.0)
    rope.apply_rope(x, x[:, :4], x[:, :4], True)
    store.store_rows(x, torch.zeros(2, dtype=torch.int64), x)


def _rows(x: Tensor) -> Tensor:
    """x as fp32 [num_rows, K] whose rows are contiguous."""
    if x.dtype != torch.float32:
        x = x.float()
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _num_threads(work: int) -> int:
    return min(torch.get_num_threads(), 1 + work // _THREAD_WORK)
