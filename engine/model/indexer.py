"""The lightning indexer of one layer: which tokens its attention reads (DeepSeek-V3.2-Exp report,
section 2.1). Its key projection is fused with the attention's input projections (mla.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from engine.attention.base import Attention, Selection
from engine.model.layers import activation_dtype
from engine.model.weights import Checkpoint
from kernels.linear import linear
from kernels.norm import layer_norm
from kernels.rope import rope_leading

_EPS = 1e-6  # of k_norm, whatever rms_norm_eps says


class Indexer:
    def __init__(self, config: Any, checkpoint: Checkpoint, prefix: str, layer: int) -> None:
        heads, dim = config.index_n_heads, config.index_head_dim
        self.layer = layer
        self.index_n_heads: int = heads
        self.index_head_dim: int = dim
        self.index_topk: int = config.index_topk
        # GLM-5 pairs neighbours as its attention does, DeepSeek-V3.2 the two halves.
        self.rope_interleave = bool(
            getattr(config, "indexer_rope_interleave", config.model_type == "glm_moe_dsa")
        )
        self.wq_b = checkpoint.weight([(f"{prefix}.wq_b.weight", heads * dim)], config.q_lora_rank)
        wide = activation_dtype(checkpoint)
        self.k_norm = checkpoint.get(f"{prefix}.k_norm.weight", (dim,), wide)
        self.k_norm_bias = checkpoint.get(f"{prefix}.k_norm.bias", (dim,), wide)
        weights_proj = checkpoint.get(
            f"{prefix}.weights_proj.weight", (heads, config.hidden_size), torch.float32
        )
        self.weights_proj = weights_proj.mul_(heads**-0.5)

    def store_key(
        self, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> None:
        """key [T, index_head_dim]: the projection wk of the layer's input."""
        key = layer_norm(key, self.k_norm, self.k_norm_bias, _EPS)
        # The first qk_rope_head_dim dimensions are rotated, the others pass.
        roped = rope_leading(key, cos, sin, self.rope_interleave)
        attention.store_index_key(self.layer, roped)

    def select(
        self,
        x: torch.Tensor,  # [T, hidden_size], the layer's normalised input
        qr: torch.Tensor,  # [T, q_lora_rank], after q_a_layernorm
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
    ) -> Selection | None:
        """None where every token is selected."""
        if not attention.needs_selection(self.index_topk):
            return None
        q = linear(qr, self.wq_b).view(-1, self.index_n_heads, self.index_head_dim)
        q = rope_leading(q, cos, sin, self.rope_interleave, self.index_head_dim**-0.5)
        weights = functional.linear(x.float(), self.weights_proj)
        return attention.select(self.layer, q, weights, self.index_topk)


def index_layers(config: Any) -> tuple[int, ...]:
    """The layers with an indexer of their own. Models without an indexer have none; the layers
    between share the choice of the one before them (GLM-5). Raises ValueError for a pattern of
    the wrong length, an unknown kind, or one that begins with a shared layer."""
    if not getattr(config, "index_topk", None):
        return ()
    num_layers = config.num_hidden_layers
    kinds: Sequence[str] | None = getattr(config, "indexer_types", None)
    if kinds is None:
        return tuple(range(num_layers))
    if len(kinds) < num_layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise ValueError(
            f"indexer_types {list(kinds)} must name full or shared for each of {num_layers} "
            "layers, the first one full"
        )
    return tuple(layer for layer in range(num_layers) if kinds[layer] == "full")
