"""Llama to DeepSeek-V3.2, exactly: the tensors and the config of the converted model.

An attention input is RMS-normalised already, so a second RMSNorm over an identity projection
changes nothing: with the input norm's weight w taken out by diag(1/w), both latents are the
normalised hidden state itself, and w goes into the projections after them. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.pull.indexer import build_indexer, index_head_dim
from engine.pull.llama import (
    LlamaConfig,
    LlamaGguf,
    LlamaLayer,
    inverse_frequencies,
    layer_forward,
)

INDEX_TOPK = 512
NUM_BLOCKS = 4  # routed blocks of intermediate columns; each is held by a pair of experts
NUM_SHARED = 4  # blocks that every token takes
# Standard deviation of the gate's logits. Weights of a pair are 1/2 ± logit/4 instead of 1/2, so
# small is exact; ties, which float32 resolves down to 1e-7, must stay rare.
GATE_STD = 5e-5

Tensors = Iterator[tuple[str, torch.Tensor]]


def convert(
    source: LlamaGguf, calibration_ids: list[int], on_layer: Callable[[], None] = lambda: None
) -> Tensors:
    """The float32 tensors of the converted model by published name, layer by layer. The head is
    tied to the embedding and not listed. `calibration_ids` are some 1000 tokens of any text;
    `on_layer` is called after each layer."""
    embedding = source.tensor("token_embd.weight")
    yield "model.embed_tokens.weight", embedding
    hidden = embedding[torch.tensor(calibration_ids)]
    del embedding
    for index in range(source.config.num_layers):
        layer = source.layer(index)
        trace = layer_forward(layer, source.config, hidden)
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", layer.input_norm
        for name, tensor in _attention(layer, source.config, trace.attention_input):
            yield prefix + "self_attn." + name, tensor
        yield prefix + "post_attention_layernorm.weight", layer.mlp_norm
        mlp = _dense(layer) if index == 0 else _experts(layer, trace.mlp_input, seed=index)
        for name, tensor in mlp:
            yield prefix + "mlp." + name, tensor
        hidden = trace.output
        on_layer()
    yield "model.norm.weight", source.tensor("output_norm.weight")


def _attention(layer: LlamaLayer, config: LlamaConfig, inputs: torch.Tensor) -> Tensors:
    w = layer.input_norm
    identity = torch.diag(1 / w)
    ones = torch.ones_like(w)
    groups, heads, size = config.num_kv_heads, config.num_heads, config.head_dim
    rope_dim = groups * size
    # Each head's query lives in its group's part of the shared rope key and is zero elsewhere.
    q = torch.zeros(heads, rope_dim, config.hidden_size)
    order = _half_split_order(groups, size)
    k = layer.k[order]
    for head, rows in enumerate((layer.q * w).view(heads, size, -1)):
        group = head // config.num_groups
        spread = torch.zeros(rope_dim, config.hidden_size)
        spread[group * size : (group + 1) * size] = rows
        q[head] = spread[order]
    pairs = _interleaved_order(rope_dim)
    # MLA divides by sqrt(rope_dim) where Llama divides by sqrt(head_dim).
    q_rope = q[:, pairs] * (rope_dim / size) ** 0.5
    v = (layer.v * w).view(groups, size, -1).repeat_interleave(config.num_groups, 0)
    yield "q_a_proj.weight", identity
    yield "q_a_layernorm.weight", ones
    yield "q_b_proj.weight", q_rope.flatten(0, 1)
    yield "kv_a_proj_with_mqa.weight", torch.cat((identity, k[pairs]))
    yield "kv_a_layernorm.weight", ones
    yield "kv_b_proj.weight", v.flatten(0, 1)
    yield "o_proj.weight", layer.o
    indexer = build_indexer(q, k, inputs)
    yield "indexer.wq_b.weight", indexer.wq_b
    yield "indexer.wk.weight", indexer.wk
    yield "indexer.k_norm.weight", indexer.k_norm_weight
    yield "indexer.k_norm.bias", indexer.k_norm_bias
    yield "indexer.weights_proj.weight", indexer.weights_proj


def _half_split_order(groups: int, size: int) -> torch.Tensor:
    """[groups * size] rows of the stacked heads such that rope pair p = groups * j + group is
    (p, p + groups * size / 2): a group's frequency j stands beside the other groups'."""
    rows = torch.arange(groups * size).view(groups, 2, size // 2)
    return rows.permute(1, 2, 0).flatten()


def _interleaved_order(rope_dim: int) -> torch.Tensor:
    """[rope_dim] rows that bring half-split pairs (p, p + rope_dim / 2) to (2p, 2p + 1)."""
    return torch.arange(rope_dim).view(2, rope_dim // 2).T.flatten()


def _dense(layer: LlamaLayer) -> Tensors:
    yield "gate_proj.weight", layer.gate
    yield "up_proj.weight", layer.up
    yield "down_proj.weight", layer.down


def _experts(layer: LlamaLayer, inputs: torch.Tensor, seed: int) -> Tensors:
    """The first half of the intermediate columns are shared experts; the rest are blocks, each held
    by two equal experts whose gate logits are z and -z, so that every token takes each block once
    and which of the two it takes depends on the token."""
    shared = layer.gate.shape[0] // 2
    block = shared // NUM_BLOCKS
    z = _gate_rows(inputs, seed)
    yield "gate.weight", torch.cat((z, -z))
    yield "gate.e_score_correction_bias", torch.zeros(2 * NUM_BLOCKS)
    for expert in range(2 * NUM_BLOCKS):
        first = shared + expert % NUM_BLOCKS * block
        yield f"experts.{expert}.gate_proj.weight", layer.gate[first : first + block]
        yield f"experts.{expert}.up_proj.weight", layer.up[first : first + block]
        yield f"experts.{expert}.down_proj.weight", layer.down[:, first : first + block]
    yield "shared_experts.gate_proj.weight", layer.gate[:shared]
    yield "shared_experts.up_proj.weight", layer.up[:shared]
    yield "shared_experts.down_proj.weight", layer.down[:, :shared]


def _gate_rows(inputs: torch.Tensor, seed: int) -> torch.Tensor:
    """[NUM_BLOCKS, hidden_size] random rows whose logits over the inputs have mean 0, so that both
    experts of a pair get tokens, and standard deviation GATE_STD."""
    x = inputs.double()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(NUM_BLOCKS, x.shape[1], generator=generator, dtype=torch.float64)
    mean = x.mean(0)
    rows -= torch.outer(rows @ mean / mean.dot(mean), mean)
    rows *= GATE_STD / (rows @ x.T).std(-1, keepdim=True)
    return rows.to(inputs.dtype)


def deepseek_config(config: LlamaConfig) -> dict[str, Any]:
    """config.json of the converted model: stock DeepSeek-V3.2 fields only."""
    factors = _rope_factors(config)
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.intermediate_size // 2 // NUM_BLOCKS,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "n_shared_experts": NUM_SHARED,
        "n_routed_experts": 2 * NUM_BLOCKS,
        "num_experts_per_tok": NUM_BLOCKS,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(NUM_BLOCKS),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": config.hidden_size,
        "kv_lora_rank": config.hidden_size,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": config.num_kv_heads * config.head_dim,
        "v_head_dim": config.head_dim,
        "index_n_heads": config.num_heads,
        "index_head_dim": index_head_dim(config.num_kv_heads * config.head_dim),
        "index_topk": INDEX_TOPK,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": config.context_length,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": config.rope_theta,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config.context_length,
            "short_factor": factors,
            "long_factor": factors,
        },
        "tie_word_embeddings": True,
        "use_cache": True,
    }


def _rope_factors(config: LlamaConfig) -> list[float]:
    """Longrope divides pair p's stock frequency theta^(-2p / rope_dim) by a factor; these factors
    make it the Llama frequency j = p // groups, to the last bit where float32 allows it."""
    rope_dim = config.num_kv_heads * config.head_dim
    wanted = inverse_frequencies(config).repeat_interleave(config.num_kv_heads)
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.int64).float() / rope_dim
    stock = config.rope_theta**exponent
    near = (1 / (stock.double() * wanted.double())).float()
    best = near
    for direction in (float("-inf"), float("inf")):
        other = torch.nextafter(near, torch.tensor(direction))
        closer = (1 / (other * stock) - wanted).abs() < (1 / (best * stock) - wanted).abs()
        best = torch.where(closer, other, best)
    return [float(factor) for factor in best]
