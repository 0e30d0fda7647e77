"""The default model beside what it was made from, both run by transformers in float32."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    LlamaForCausalLM,
)
from transformers import LlamaConfig as HfLlamaConfig

from engine.pull.llama import LlamaGguf


def prose(num_chars: int) -> str:
    """English text that every Python carries and that is not the calibration text."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in ("objects", "execmodel", "naming"))[:num_chars]


def llama(source: LlamaGguf) -> Any:
    """The source model as transformers' Llama."""
    config = source.config
    with torch.device("meta"):
        model = LlamaForCausalLM(
            HfLlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                max_position_embeddings=config.context_length,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=True,
            )
        )
    state = {
        "model.embed_tokens.weight": source.tensor("token_embd.weight"),
        "model.norm.weight": source.tensor("output_norm.weight"),
    }
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for index in range(config.num_layers):
        layer, prefix = source.layer(index), f"model.layers.{index}."
        state[prefix + "input_layernorm.weight"] = layer.input_norm
        state[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
        for name in ("q", "k", "v", "o"):
            state[f"{prefix}self_attn.{name}_proj.weight"] = getattr(layer, name)
        for name in ("gate", "up", "down"):
            state[f"{prefix}mlp.{name}_proj.weight"] = getattr(layer, name)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # a buffer left on meta
    return model.eval()


def deepseek(tensors: Iterable[tuple[str, torch.Tensor]], config: dict[str, Any]) -> Any:
    """Converted tensors in transformers' DeepSeek-V3.2, without a file between. It keeps experts
    stacked, gate and up rows together."""
    hf_config = DeepseekV32Config(**config)
    hf_config._experts_implementation = "eager"
    with torch.device("meta"):
        model = DeepseekV32ForCausalLM(hf_config)
    state = dict(tensors)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for index in range(1, hf_config.num_hidden_layers):
        experts = f"model.layers.{index}.mlp.experts."
        rows = [
            {name: state.pop(f"{experts}{i}.{name}_proj.weight") for name in ("gate", "up", "down")}
            for i in range(hf_config.n_routed_experts)
        ]
        gate_up = [torch.cat((row["gate"], row["up"])) for row in rows]
        state[experts + "gate_up_proj"] = torch.stack(gate_up)
        state[experts + "down_proj"] = torch.stack([row["down"] for row in rows])
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A converted folder as a user of transformers loads it, computed in `dtype`."""
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    return model.eval()


def set_topk(model: Any, topk: int) -> None:
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = topk


@torch.no_grad()
def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    """[T, vocab_size]"""
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def divergences(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence (nats) at each position of log-probabilities [T, vocab_size]."""
    return (reference.double().exp() * (reference.double() - other.double())).sum(-1)


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """The mean of `divergences`."""
    return float(divergences(reference, other).mean())


def agreement(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Share of positions with the same likeliest token."""
    return float((reference.argmax(-1) == other.argmax(-1)).float().mean())


@torch.no_grad()
def perplexity(model: Any, ids: list[int]) -> float:
    """Of the second half of a text, given what comes before each token."""
    hidden = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    half = len(ids) // 2
    logits = model.lm_head(hidden[half - 1 : -1]).float()
    return float(F.cross_entropy(logits, torch.tensor(ids[half:])).exp())


@torch.no_grad()
def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """`count` likeliest tokens, one by one through transformers' cache."""
    cache, token, out = None, torch.tensor([ids]), []
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"  # renamed by transformers 5
    for _ in range(count):
        result = model(token, use_cache=True, **{name: cache})
        cache = result[name]
        token = result.logits[:, -1:].argmax(-1)
        out.append(int(token))
    return out
