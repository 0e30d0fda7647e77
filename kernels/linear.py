"""Matrix products with weights in 16 or 32 bits: chooses the implementation by device and dtype.

Knows no model; the numba form of the same functions lives in kernels.cpu.
"""

import torch
from torch import Tensor
from torch.nn import functional

_EXPAND_ROWS = 4096  # weight rows expanded to fp32 at a time by the fallback


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] times w [N, K] transposed, plus bias [N] -> [.., N] in x.dtype."""
    if x.dtype == w.dtype:
        return functional.linear(x, w, bias)
    parts = [
        functional.linear(x, w[lo : lo + _EXPAND_ROWS].to(x.dtype))
        for lo in range(0, w.shape[0], _EXPAND_ROWS)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return out if bias is None else out + bias.to(out.dtype)


def swiglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """silu(x·gate) * (x·up) · down: x [.., H], w_gate_up [2I, H], w_down [H, I] -> [.., H]."""
    gate, up = linear(x, w_gate_up).chunk(2, dim=-1)
    return linear(functional.silu(gate) * up, w_down)


def fast_bf16_available() -> bool:
    """Whether bf16 weights cost no speed on this machine's CPU."""
    return False
