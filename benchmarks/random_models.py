"""Models with random weights, made in memory: the shapes that figures are given for, and small
ones of the same builds for correctness gates."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import torch
from transformers import DeepseekV32Config, LlamaConfig

from engine.config import IndexCacheDtype
from engine.loading import Weights, numbers_of
from engine.model.base import Model
from engine.model.deepseek import DeepseekModel
from engine.model.llama import LlamaModel
from kernels.block_fp8 import BlockFp8, Weight

_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_DSV32: Final[dict[str, Any]] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_parameters": _YARN,
}
_SMALL: Final[dict[str, Any]] = _DSV32 | {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 16,
    "q_lora_rank": 128,
    "index_n_heads": 32,
    "index_topk": 64,
    "vocab_size": 1024,
}
# The default model's geometry, with random weights, fewer layers and a smaller vocabulary.
_DEFAULT: Final[dict[str, Any]] = _SMALL | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 9,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 576,
    "kv_lora_rank": 576,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 192,
    "v_head_dim": 64,
    "index_n_heads": 9,
    "index_head_dim": 256,
    "index_topk": 64,
    "vocab_size": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
_LLAMA: Final[dict[str, Any]] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
_SMALL_LLAMA: Final[dict[str, Any]] = _LLAMA | {
    "hidden_size": 384,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
_FP8: Final = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
CONFIGS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "dsv32-5l": (DeepseekV32Config, _DSV32),
    "dsv32-5l-fp8": (DeepseekV32Config, _DSV32 | _FP8),
    "dsv32-small": (DeepseekV32Config, _SMALL),
    "dsv32-small-fp8": (DeepseekV32Config, _SMALL | _FP8),
    "default-small": (DeepseekV32Config, _DEFAULT),
    "llama-1b": (LlamaConfig, _LLAMA),
    "llama-small": (LlamaConfig, _SMALL_LLAMA),
}


class RandomWeights:
    """Stands for a checkpoint: normal(0, `std`), norms 1, router bias 0, drawn by tensor name, so
    that every rank, and on the CPU every device, has the same. With `keeps_fp8` what the model can
    take in block fp8 is; the parts' rows must allow it."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        std: float = 0.02,
        draws_on_cpu: bool = False,
        keeps_fp8: bool = False,
    ) -> None:
        self.device, self.dtype = device, dtype
        self._keeps_fp8 = keeps_fp8
        self._std = std
        self._source = torch.device("cpu") if draws_on_cpu else device
        self.held_bytes = 0  # counted only where workers share a machine's memory: not here

    def has(self, name: str) -> bool:
        # In fp8 experts are published one by one.
        return not (self._keeps_fp8 and name.endswith(".experts.gate_up_proj"))

    def get(self, name: str, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype, shape = dtype or self.dtype, tuple(shape)
        if "norm" in name or name.endswith("bias"):
            value = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, value, dtype=dtype, device=self.device)
        digest = hashlib.sha256(name.encode()).digest()
        generator = torch.Generator(self._source)
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        # As drawn in float32, whatever the dtype: 16 bits are then the rounding of 32.
        drawn = torch.empty(shape, device=self._source).normal_(0, self._std, generator=generator)
        return drawn.to(self.device, dtype)

    def fused(self, parts: list[tuple[str, int]], *inner: int) -> torch.Tensor:
        return torch.cat([self.get(name, (rows, *inner)) for name, rows in parts])

    def weight(self, parts: list[tuple[str, int]], columns: int) -> Weight:
        if not self._keeps_fp8:
            return self.fused(parts, columns)
        out = BlockFp8.empty(sum(rows for _, rows in parts), columns, device=self.device)
        begin = 0
        for name, rows in parts:
            own = out[begin : begin + rows]
            drawn = BlockFp8.quantised(self.get(name, (rows, columns), torch.float32))
            own.codes.copy_(drawn.codes)
            own.scales.copy_(drawn.scales)
            begin += rows
        return out


def build_config(name: str, context_length: int | None = None, **changes: Any) -> Any:
    kind, values = CONFIGS[name]
    config = kind(**(values | changes))
    config.context_length = context_length or config.max_position_embeddings
    return config


def build_weights(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    context_length: int | None = None,
    *,
    std: float = 0.02,
    draws_on_cpu: bool = False,
    index_cache_dtype: IndexCacheDtype = "auto",
) -> Weights:
    config = build_config(name, context_length)
    keeps_fp8 = getattr(config, "quantization_config", None) is not None
    source: Any = RandomWeights(
        device, dtype, std=std, draws_on_cpu=draws_on_cpu, keeps_fp8=keeps_fp8
    )
    kind = DeepseekModel if config.model_type == "deepseek_v32" else LlamaModel
    model: Model = kind.load(config, source)
    return Weights(model, device, numbers_of(dtype, device, keeps_fp8, index_cache_dtype))
