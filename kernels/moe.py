"""The routed experts of one layer: tokens grouped by expert, each expert's weights read once.

Routing (gate, groups, bias) is the model's; this module is given its result.
"""

import torch
from torch import Tensor

from kernels.linear import swiglu_mlp


def moe(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """x [T, H], w13 [E, 2I, H], w2 [E, H, I], topk_ids [T, k] int64, topk_weights [T, k] -> [T, H].

    Each expert is silu(gate) * up, the gate being the first I rows of w13. fp32 accumulation.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        y = swiglu_mlp(x[token], w13[expert], w2[expert])
        out.index_add_(0, token, y.float() * topk_weights[token, choice, None].float())
    return out.to(x.dtype)
