"""The parts that every decoder shares: vocabulary in, vocabulary out, the gated MLP. Knows no
attention and no architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from engine.model.weights import Checkpoint
from kernels.block_fp8 import Weight
from kernels.linear import add_swiglu_, linear, swiglu_mlp


def activation_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """float32 on a CPU, whose 16-bit arithmetic is no faster, else the weights' dtype."""
    return torch.float32 if checkpoint.device.type == "cpu" else checkpoint.dtype


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token embedding and the output head, one tensor where the checkpoint ties them."""

    embed_tokens: torch.Tensor  # [vocab_size, hidden_size]
    lm_head: torch.Tensor  # [vocab_size, hidden_size]
    activations: torch.dtype

    @classmethod
    def load(cls, config: Any, checkpoint: Checkpoint) -> Vocabulary:
        shape = (config.vocab_size, config.hidden_size)
        embed_tokens = checkpoint.get("model.embed_tokens.weight", shape)
        tied = bool(config.tie_word_embeddings)
        lm_head = embed_tokens if tied else checkpoint.get("lm_head.weight", shape)
        return cls(embed_tokens, lm_head, activation_dtype(checkpoint))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden_size] in the activations' dtype."""
        return functional.embedding(token_ids, self.embed_tokens).to(self.activations)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32."""
        return linear(hidden, self.lm_head).float()


@dataclass(frozen=True, slots=True)
class Mlp:
    """down_proj(silu(gate_proj x) * up_proj x), gate and up fused."""

    gate_up_proj: Weight  # [2 * intermediate_size, hidden_size]
    down_proj: Weight  # [hidden_size, intermediate_size]

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, hidden: int, intermediate: int) -> Mlp:
        """From the tensors {prefix}.gate_proj.weight, up_proj and down_proj."""
        parts = [(f"{prefix}.{name}.weight", intermediate) for name in ("gate_proj", "up_proj")]
        return cls(
            checkpoint.weight(parts, hidden),
            checkpoint.weight([(f"{prefix}.down_proj.weight", hidden)], intermediate),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        return swiglu_mlp(x, self.gate_up_proj, self.down_proj)

    def add_to(self, h: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """h [T, hidden_size] plus the output for rms_norm(h), in place."""
        return add_swiglu_(h, norm, eps, self.gate_up_proj, self.down_proj)


def check_activation(config: Any) -> None:
    """Raises ValueError where the config's MLP is not gated by silu, without biases."""
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; accepted is 'silu'")
    if getattr(config, "mlp_bias", False):
        raise ValueError("mlp_bias true is not supported; accepted are MLPs without biases")
