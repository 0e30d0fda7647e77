"""The model port: what the runner asks of a loaded checkpoint."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.base import Attention
from kvcache.layout import KVGeometry


class Model(Protocol):
    geometry: KVGeometry
    vocab_size: int
    context_length: int  # max_position_embeddings
    num_bytes: int  # of its weights, where they are
    rope_context: int  # see engine.model.rope
    index_topk: int  # tokens that a query's attention reads at most; 0: all

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """token_ids and absolute positions [T] int64 -> hidden states after the final norm,
        [T, hidden_size]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32."""
        ...
