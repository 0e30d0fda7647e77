"""DeepSeek-V2, V3, V3.2 and GLM-5: latent attention, mixture of experts and, in the latter two, the
indexer, under the checkpoints' names. Knows no pages: the attention port keeps latent rows.

Multi-token-prediction layers, which follow the last one in a checkpoint, are not loaded.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.base import Attention, Selection
from engine.model.indexer import index_layers
from engine.model.layers import Mlp, Vocabulary, activation_dtype, check_activation
from engine.model.mla import MlaAttention
from engine.model.moe import Moe
from engine.model.rope import RotaryEmbedding, rope_context
from engine.model.weights import Checkpoint
from kernels.norm import rms_norm
from kvcache.layout import KVGeometry


class DeepseekLayer:
    def __init__(self, config: Any, checkpoint: Checkpoint, layer: int, has_indexer: bool) -> None:
        prefix, hidden = f"model.layers.{layer}", config.hidden_size
        wide = activation_dtype(checkpoint)
        self.eps: float = config.rms_norm_eps
        self.input_layernorm = checkpoint.get(f"{prefix}.input_layernorm.weight", (hidden,), wide)
        self.self_attn = MlaAttention(config, checkpoint, layer, has_indexer)
        self.post_attention_layernorm = checkpoint.get(
            f"{prefix}.post_attention_layernorm.weight", (hidden,), wide
        )
        self.mlp: Mlp | Moe = (
            Moe(config, checkpoint, f"{prefix}.mlp")
            if has_experts(config, layer)
            else Mlp.load(checkpoint, f"{prefix}.mlp", hidden, config.intermediate_size)
        )

    def __call__(
        self,
        h: torch.Tensor,  # [T, hidden_size]
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
        selection: Selection | None,
    ) -> tuple[torch.Tensor, Selection | None]:
        """h with both residual branches added, in place; what was selected."""
        selection = self.self_attn.add_to(
            h, self.input_layernorm, self.eps, cos, sin, attention, selection
        )
        return self.mlp.add_to(h, self.post_attention_layernorm, self.eps), selection


class DeepseekModel:
    """The model port (engine/model/base.py) for this family."""

    def __init__(self, config: Any, checkpoint: Checkpoint) -> None:
        self.vocab_size = int(config.vocab_size)
        self.context_length = int(config.context_length)
        self.rope_context = rope_context(config)
        indexers = index_layers(config)
        self.index_topk = int(config.index_topk) if indexers else 0
        self.geometry = KVGeometry(
            num_layers=config.num_hidden_layers,
            latent_dim=config.kv_lora_rank + config.qk_rope_head_dim,
            index_dim=config.index_head_dim if indexers else 0,
            index_layers=indexers,
        )
        self.eps: float = config.rms_norm_eps
        self.vocabulary = Vocabulary.load(config, checkpoint)
        self.layers = [
            DeepseekLayer(config, checkpoint, layer, layer in indexers)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = checkpoint.get(
            "model.norm.weight", (config.hidden_size,), activation_dtype(checkpoint)
        )
        self.rotary_emb = RotaryEmbedding.from_config(
            config, config.qk_rope_head_dim, device=checkpoint.device
        )
        self.num_bytes = checkpoint.held_bytes

    @classmethod
    def load(cls, config: Any, checkpoint: Checkpoint) -> DeepseekModel:
        """Raises ValueError where the config asks for what this family here does not do, and
        WeightError for a tensor that is missing or mis-shaped."""
        check_activation(config)
        if getattr(config, "index_topk", None) and not config.q_lora_rank:
            raise ValueError(
                f"index_topk {config.index_topk} needs a q_lora_rank, got {config.q_lora_rank}: "
                "the indexer's queries are made of it"
            )
        return cls(config, checkpoint)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden_size]."""
        h = self.vocabulary.embed(token_ids)
        cos, sin = self.rotary_emb(positions)
        selection: Selection | None = None
        for layer in self.layers:
            h, selection = layer(h, cos, sin, attention, selection)
        return rms_norm(h, self.norm, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32."""
        return self.vocabulary.logits(hidden)


def has_experts(config: Any, layer: int) -> bool:
    """mlp_layer_types where the config has them, else every layer from first_k_dense_replace on."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is not None:
        return bool(kinds[layer] == "sparse")
    return bool(layer >= config.first_k_dense_replace)
