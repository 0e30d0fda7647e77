"""The attention port: what a model's layer asks of the KV cache. One object serves one forward; it
knows the batch, the pool and how the cache is read. Models know neither."""

from __future__ import annotations

from typing import Protocol

import torch


class Selection(Protocol):
    """The indexer's choice for every query of the batch; opaque to models (layers may share it)."""


class Attention(Protocol):
    """Bound to one ForwardBatch of T tokens. Each call first stores the new tokens' rows."""

    def gqa(
        self,
        layer: int,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        k: torch.Tensor,  # [T, num_kv_heads, head_dim]
        v: torch.Tensor,  # [T, num_kv_heads, head_dim]
        scale: float,
    ) -> torch.Tensor:  # [T, num_heads, head_dim]
        """Causal grouped-query attention over each request's whole context."""
        ...

    def store_index_key(self, layer: int, key: torch.Tensor) -> None:
        """Store the new tokens' index keys, [T, index_head_dim]."""
        ...

    def needs_selection(self, topk: int) -> bool:
        """Whether some query of this batch sees more than `topk` tokens. Where not, every token is
        selected and the indexer's queries need not be computed."""
        ...

    def select(
        self,
        layer: int,
        q: torch.Tensor,  # [T, index_n_heads, index_head_dim], scaled by index_head_dim**-0.5
        weights: torch.Tensor,  # [T, index_n_heads] float32, scaled by index_n_heads**-0.5
        topk: int,
    ) -> Selection:
        """The exact top-k tokens of each query under the causal mask: score descending, then
        position ascending."""
        ...

    def mla(
        self,
        layer: int,
        q_nope: torch.Tensor,  # [T, num_heads, qk_nope_head_dim], may be 0 wide
        q_pe: torch.Tensor,  # [T, num_heads, qk_rope_head_dim], roped
        latent: torch.Tensor,  # [T, kv_lora_rank], after kv_a_layernorm
        k_pe: torch.Tensor,  # [T, qk_rope_head_dim], roped
        w_uk: torch.Tensor,  # [num_heads, qk_nope_head_dim, kv_lora_rank]
        w_uv: torch.Tensor,  # [num_heads, v_head_dim, kv_lora_rank]
        scale: float,
        selection: Selection | None,  # None: dense
    ) -> torch.Tensor:  # [T, num_heads, v_head_dim]
        """Multi-head latent attention over the selected tokens of each request's context."""
        ...
