"""Multi-head latent attention of one layer (DeepSeek-V2 report, section 2.1), with the layer's
indexer where it has one. The projections that read the layer's input are one matrix."""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.base import Attention, Selection
from engine.model.indexer import Indexer
from engine.model.layers import activation_dtype
from engine.model.rope import mla_softmax_scale
from engine.model.weights import Checkpoint
from kernels.linear import add_linear_, norm_linear
from kernels.norm import rms_norm
from kernels.rope import apply_rope

_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says


class MlaAttention:
    def __init__(self, config: Any, checkpoint: Checkpoint, layer: int, has_indexer: bool) -> None:
        prefix, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
        self.layer = layer
        self.num_heads: int = config.num_attention_heads
        self.q_lora_rank: int | None = config.q_lora_rank
        self.kv_lora_rank: int = config.kv_lora_rank
        self.nope: int = config.qk_nope_head_dim
        self.rope: int = config.qk_rope_head_dim
        self.scale = mla_softmax_scale(config)
        self.rope_interleave = bool(getattr(config, "rope_interleave", True))
        q_rows = self.num_heads * (self.nope + self.rope)
        self.indexer = (
            Indexer(config, checkpoint, f"{prefix}.indexer", layer) if has_indexer else None
        )
        parts = [
            (f"{prefix}.q_a_proj", self.q_lora_rank)
            if self.q_lora_rank
            else (f"{prefix}.q_proj", q_rows),
        ]
        if self.indexer is not None:
            parts.append((f"{prefix}.indexer.wk", self.indexer.index_head_dim))
        # Last, for its end lies within a block of fp8.
        parts.append((f"{prefix}.kv_a_proj_with_mqa", self.kv_lora_rank + self.rope))
        self.splits = [rows for _, rows in parts]
        weights = [(f"{name}.weight", rows) for name, rows in parts]
        self.input_proj = checkpoint.weight(weights, hidden)
        wide = activation_dtype(checkpoint)
        if self.q_lora_rank:
            rank = self.q_lora_rank
            self.q_a_layernorm = checkpoint.get(f"{prefix}.q_a_layernorm.weight", (rank,), wide)
            self.q_b_proj = checkpoint.weight([(f"{prefix}.q_b_proj.weight", q_rows)], rank)
        self.kv_a_layernorm = checkpoint.get(
            f"{prefix}.kv_a_layernorm.weight", (self.kv_lora_rank,), wide
        )
        self.w_uk, self.w_uv = _load_kv_b(config, checkpoint, prefix)
        v_rows = self.num_heads * config.v_head_dim
        self.o_proj = checkpoint.weight([(f"{prefix}.o_proj.weight", hidden)], v_rows)
        self.input_bias = self.o_bias = None
        if config.attention_bias:
            self.input_bias = _load_bias(checkpoint, parts)
            self.o_bias = checkpoint.get(f"{prefix}.o_proj.bias", (hidden,))

    def add_to(
        self,
        h: torch.Tensor,  # [T, hidden_size], gets the attention of rms_norm(h) added in place
        norm: torch.Tensor,
        eps: float,
        cos: torch.Tensor,  # [T, qk_rope_head_dim / 2]
        sin: torch.Tensor,
        attention: Attention,
        selection: Selection | None,  # the previous layer's, used where this one has no indexer
    ) -> Selection | None:  # what was selected
        x, projected = norm_linear(h, norm, eps, self.input_proj, self.input_bias)
        q, *index_key, kv = torch.split(projected, self.splits, dim=-1)
        if self.q_lora_rank:
            qr, q = norm_linear(q, self.q_a_layernorm, _EPS, self.q_b_proj)
            if self.indexer is not None:
                self.indexer.store_key(index_key[0], cos, sin, attention)
                selection = self.indexer.select(x, qr, cos, sin, attention)
        q = q.view(-1, self.num_heads, self.nope + self.rope)
        latent = rms_norm(kv[:, : self.kv_lora_rank], self.kv_a_layernorm, _EPS)
        k_pe = apply_rope(kv[:, self.kv_lora_rank :], cos, sin, self.rope_interleave)
        q_pe = apply_rope(q[..., self.nope :], cos, sin, self.rope_interleave)
        out = attention.mla(
            self.layer,
            q[..., : self.nope],
            q_pe,
            latent,
            k_pe,
            self.w_uk,
            self.w_uv,
            self.scale,
            selection,
        )
        add_linear_(h, out.reshape(len(h), -1), self.o_proj, self.o_bias)
        return selection


def _load_kv_b(
    config: Any, checkpoint: Checkpoint, prefix: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_b_proj as w_uk [H, nope, kv_lora_rank] and w_uv [H, v_head_dim, kv_lora_rank]."""
    heads, nope, v_dim = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    shape = (heads * (nope + v_dim), config.kv_lora_rank)
    kv_b = checkpoint.get(f"{prefix}.kv_b_proj.weight", shape)
    w_uk, w_uv = torch.split(kv_b.view(heads, nope + v_dim, -1), [nope, v_dim], dim=1)
    return w_uk.contiguous(), w_uv.contiguous()


def _load_bias(checkpoint: Checkpoint, parts: list[tuple[str, int]]) -> torch.Tensor:
    """Biases of the input projections; V2's q_proj and the indexer's wk never have one."""
    total = sum(rows for _, rows in parts)
    bias = torch.zeros(total, dtype=checkpoint.dtype, device=checkpoint.device)
    begin = 0
    for name, rows in parts:
        if not name.endswith((".q_proj", ".wk")):
            checkpoint.fill(bias[begin : begin + rows], f"{name}.bias")
        begin += rows
    return bias
