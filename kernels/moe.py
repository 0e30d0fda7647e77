"""The routed experts of one layer: tokens grouped by expert, each expert's weights read once.

Routing (gate, groups, bias) is the model's; this module is given its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.block_fp8 import BlockFp8, Weight
from kernels.dispatch import cpu_kernels, fall_back, gpu_kernels, keeps_block_fp8
from kernels.linear import swiglu_mlp


def moe(x: Tensor, w13: Weight, w2: Weight, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """x [T, H], w13 [E, 2I, H] (gate first), w2 [E, H, I], topk_ids [T, k] int64 in [0, E),
    topk_weights [T, k] -> [T, H] in x.dtype: sum of weight * (silu(gate) * up) · w2ᵀ.

    fp32 accumulation. A token may name an expert twice. Batch invariant where `linear` is.
    Raises ValueError where the shapes do not fit or, but on a GPU, an id is no expert's.
    """
    _check(x, w13, w2, topk_ids, topk_weights)
    if (cpu := cpu_kernels(x, w13, w2)) is not None:
        out: Tensor = cpu.moe(x, w13, w2, topk_ids, topk_weights)
        return out
    if _on_gpu(x, w13, w2, topk_ids, topk_weights):
        from kernels.gpu import moe as gpu

        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return gpu.add_moe_(out, x, w13, w2, topk_ids, topk_weights, None, adds=False)
    return moe_reference(x, w13, w2, topk_ids, topk_weights)


def _check(x: Tensor, w13: Weight, w2: Weight, topk_ids: Tensor, topk_weights: Tensor) -> None:
    num_experts, hidden, inner = w2.shape
    if w13.shape != (num_experts, 2 * inner, hidden) or x.shape[1:] != (hidden,):
        raise ValueError(
            f"x {list(x.shape)} needs w13 [E, 2I, H] and w2 [E, H, I], "
            f"got {list(w13.shape)} and {list(w2.shape)}"
        )
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_ids {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)} "
            f"must both be [{x.shape[0]}, k]"
        )


def add_moe_(
    h: Tensor,
    x: Tensor,
    w13: Weight,
    w2: Weight,
    topk_ids: Tensor,
    topk_weights: Tensor,
    shared: tuple[Weight, Weight] | None,
) -> Tensor:
    """h [T, H] += moe(x, ...) and, where there are shared experts (their gate and up [2S, H], down
    [H, S]), their gated MLP of x, unweighted; in place, h is returned. Shapes as for `moe`, which
    checks them."""
    _check(x, w13, w2, topk_ids, topk_weights)
    if h.dtype == torch.float32 and h.is_contiguous():
        weights = (w13, w2) if shared is None else (w13, w2, *shared)
        if (cpu := cpu_kernels(x, *weights)) is not None:
            cpu.add_moe_(h, x, w13, w2, topk_ids, topk_weights, shared)
            return h
    if _on_gpu(x, w13, w2, topk_ids, topk_weights) and h.dtype == x.dtype and h.is_contiguous():
        from kernels.gpu import moe as gpu

        own = None if shared is None else swiglu_mlp(x, *shared)
        return gpu.add_moe_(h, x, w13, w2, topk_ids, topk_weights, own)
    h.add_(moe(x, w13, w2, topk_ids, topk_weights))
    return h if shared is None else h.add_(swiglu_mlp(x, *shared))


def _on_gpu(x: Tensor, w13: Weight, w2: Weight, topk_ids: Tensor, topk_weights: Tensor) -> bool:
    if not gpu_kernels(x, topk_ids, topk_weights):
        return False
    if not all(_fits(x, w) for w in (w13, w2)):
        fall_back("moe", f"x is {x.dtype}, the experts are {w13.dtype} and {w2.dtype}")
        return False
    return x.stride(1) == 1


def _fits(x: Tensor, w: Weight) -> bool:
    if isinstance(w, BlockFp8):
        return keeps_block_fp8(x.device) and w.codes.is_contiguous() and w.shape[2] % 16 == 0
    return gpu_kernels(x, w) and x.dtype == w.dtype and w.is_contiguous()


def moe_reference(
    x: Tensor, w13: Weight, w2: Weight, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """`moe` in plain torch, for any device."""
    experts = sorted(set(topk_ids.flatten().tolist()))
    if experts and not 0 <= experts[0] <= experts[-1] < w2.shape[0]:
        raise ValueError(f"topk_ids names experts {experts}, expected 0 to {w2.shape[0] - 1}")
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in experts:
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        y = swiglu_mlp(x[token], w13[expert], w2[expert])
        out.index_add_(0, token, y.float() * topk_weights[token, choice, None].float())
    return out.to(x.dtype)
