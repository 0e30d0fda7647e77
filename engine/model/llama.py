"""Llama, Mistral, Qwen2 and Qwen3: dense decoders with grouped-query attention, under the
checkpoints' names. Knows no pages: the attention port keeps keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import Attention
from engine.model.layers import Mlp, Vocabulary, activation_dtype, check_activation
from engine.model.rope import RotaryEmbedding, rope_context, rope_parameters
from engine.model.weights import Checkpoint
from kernels.linear import linear
from kernels.norm import rms_norm
from kernels.rope import rope_leading
from kvcache.layout import KVGeometry


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one layer, as the config names them."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # the first dimensions of each head that are rotated
    eps: float
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool

    @classmethod
    def from_config(cls, config: Any) -> Shape:
        head_dim = getattr(config, "head_dim", None)
        head_dim = int(head_dim or config.hidden_size // config.num_attention_heads)
        partial = rope_parameters(config).get("partial_rotary_factor") or 1.0
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rotary_dim=int(head_dim * partial),
            eps=config.rms_norm_eps,
            qkv_bias=attention_bias or config.model_type == "qwen2",
            o_bias=attention_bias,
            qk_norm=config.model_type == "qwen3",
        )


class LlamaAttention:
    def __init__(self, shape: Shape, checkpoint: Checkpoint, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        q_rows, kv_rows = (
            shape.num_heads * shape.head_dim,
            shape.num_kv_heads * shape.head_dim,
        )
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        norms = activation_dtype(checkpoint)
        self.shape, self.layer = shape, layer
        hidden = shape.hidden_size
        qkv = [(f"{prefix}.{name}.weight", n) for name, n in rows.items()]
        self.qkv_proj = checkpoint.weight(qkv, hidden)
        self.o_proj = checkpoint.weight([(f"{prefix}.o_proj.weight", hidden)], q_rows)
        self.qkv_bias = self.o_bias = self.q_norm = self.k_norm = None
        if shape.qkv_bias:
            biases = [(f"{prefix}.{name}.bias", n) for name, n in rows.items()]
            self.qkv_bias = checkpoint.fused(biases)
        if shape.o_bias:
            self.o_bias = checkpoint.get(f"{prefix}.o_proj.bias", (shape.hidden_size,))
        if shape.qk_norm:
            self.q_norm = checkpoint.get(f"{prefix}.q_norm.weight", (shape.head_dim,), norms)
            self.k_norm = checkpoint.get(f"{prefix}.k_norm.weight", (shape.head_dim,), norms)

    def __call__(
        self,
        x: torch.Tensor,  # [T, hidden_size]
        cos: torch.Tensor,  # [T, rotary_dim / 2]
        sin: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:  # [T, hidden_size]
        shape, heads = self.shape, self.shape.num_heads
        qkv = linear(x, self.qkv_proj, self.qkv_bias).view(x.shape[0], -1, shape.head_dim)
        qk, v = qkv[:, : heads + shape.num_kv_heads], qkv[:, heads + shape.num_kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(qk[:, :heads], self.q_norm, shape.eps)
            k = rms_norm(qk[:, heads:], self.k_norm, shape.eps)
            qk = torch.cat((q, k), dim=1)
        roped = rope_leading(qk, cos, sin, interleaved=False)
        scale = shape.head_dim**-0.5
        out = attention.gqa(self.layer, roped[:, :heads], roped[:, heads:], v, scale)
        return linear(out.reshape(x.shape[0], -1), self.o_proj, self.o_bias)


class LlamaLayer:
    def __init__(self, shape: Shape, checkpoint: Checkpoint, layer: int) -> None:
        prefix, hidden = f"model.layers.{layer}", shape.hidden_size
        norms = activation_dtype(checkpoint)
        self.eps = shape.eps
        self.input_layernorm = checkpoint.get(f"{prefix}.input_layernorm.weight", (hidden,), norms)
        self.self_attn = LlamaAttention(shape, checkpoint, layer)
        self.post_attention_layernorm = checkpoint.get(
            f"{prefix}.post_attention_layernorm.weight", (hidden,), norms
        )
        self.mlp = Mlp.load(checkpoint, f"{prefix}.mlp", hidden, shape.intermediate_size)

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> torch.Tensor:  # [T, hidden_size]
        normed = rms_norm(x, self.input_layernorm, self.eps)
        x = x + self.self_attn(normed, cos, sin, attention)
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm, self.eps))


class LlamaModel:
    """The model port (engine/model/base.py) for this family."""

    def __init__(self, config: Any, checkpoint: Checkpoint) -> None:
        shape = Shape.from_config(config)
        self.context_length = int(config.context_length)
        self.rope_context = rope_context(config)
        self.vocab_size = int(config.vocab_size)
        self.index_topk = 0
        self.geometry = KVGeometry(
            num_layers=config.num_hidden_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        self.eps = shape.eps
        self.vocabulary = Vocabulary.load(config, checkpoint)
        self.layers = [
            LlamaLayer(shape, checkpoint, layer) for layer in range(config.num_hidden_layers)
        ]
        self.norm = checkpoint.get(
            "model.norm.weight", (shape.hidden_size,), activation_dtype(checkpoint)
        )
        self.rotary_emb = RotaryEmbedding.from_config(
            config, shape.rotary_dim, device=checkpoint.device
        )
        self.num_bytes = checkpoint.held_bytes

    @classmethod
    def load(cls, config: Any, checkpoint: Checkpoint) -> LlamaModel:
        """Raises ValueError where the config asks for what this family here does not do, and
        WeightError for a tensor that is missing or mis-shaped."""
        check_activation(config)
        check_sliding_window(config)
        return cls(config, checkpoint)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden_size]."""
        x = self.vocabulary.embed(token_ids)
        cos, sin = self.rotary_emb(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return rms_norm(x, self.norm, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32."""
        return self.vocabulary.logits(hidden)


def check_sliding_window(config: Any) -> None:
    """Raises ValueError where some layer would see less than the served context. A window as wide
    as the context, or one that no layer uses, changes nothing."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    slides = window is not None and (kinds is None or "sliding_attention" in kinds)
    if slides and window < config.context_length:
        raise ValueError(
            f"sliding_window {window} is not supported below the context length "
            f"({config.context_length}); accepted is a context length up to {window}"
        )
