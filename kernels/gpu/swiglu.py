"""The gate of the gated MLP. The specification is kernels.linear.swiglu_mlp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul(
    gate_up,  # [T, 2 · inner], gate first
    out,  # [T, inner]
    inner,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = gate_up + token * 2 * inner + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * inner + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 · inner] contiguous -> silu(first half) * second half, [..., inner]."""
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], inner))
    if out.numel() == 0:
        return out
    block = min(2048, triton.next_power_of_2(inner))
    _silu_mul[(out.numel() // inner, triton.cdiv(inner, block))](
        gate_up, out, inner, BLOCK=block, num_warps=max(1, min(8, block // 256))
    )
    return out
