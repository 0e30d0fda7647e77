"""Small checkpoints with random weights, written by transformers and read by our loader."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from kernels.block_fp8 import BlockFp8

_LINEAR = re.compile(r"\.((?!weights)\w+_proj(_with_mqa)?|wk|wq_b)\.weight$")
# What both DeepSeek checkpoints have: MoE layers after a dense one, groups of experts.
_DEEPSEEK = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 4096,
}


def save_dsa(
    folder: Path,
    *,
    vocab_size: int = 199,
    index_topk: int = 16,
    seed: int = 0,
    head_scale: float = 1.0,
) -> Path:
    """DeepSeek-V3.2: two MoE layers after a dense one, selection from 17 tokens of context on.
    `head_scale` multiplies the logits: without it all tokens are nearly equally likely."""
    torch.manual_seed(seed)
    config = DeepseekV32Config(
        **_DEEPSEEK,
        vocab_size=vocab_size,
        num_hidden_layers=3,
        index_n_heads=32,
        index_head_dim=32,
        index_topk=index_topk,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = DeepseekV32ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= head_scale
    model.save_pretrained(folder)
    return folder


def save_dsa_fp8(folder: Path) -> Path:
    """DeepSeek-V3.2 as it is published, with its linears in block fp8; large enough for most of
    their parts to begin where blocks do."""
    torch.manual_seed(0)
    sizes = _DEEPSEEK | {"moe_intermediate_size": 128, "q_lora_rank": 128}
    config = DeepseekV32Config(
        **sizes,
        vocab_size=199,
        num_hidden_layers=2,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=16,
    )
    model = DeepseekV32ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 20.0
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name in filter(_LINEAR.search, list(stored)):
        held = BlockFp8.quantised(stored[name])
        stored |= {name: held.codes, f"{name}_scale_inv": held.scales}
    save_file(stored, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def save_dsa_chat(folder: Path, tokenizer_of: Path) -> Path:
    """`save_dsa` that speaks: the vocabulary, tokenizer and chat template of the model in
    `tokenizer_of`. Its weights are float32; what it says is noise."""
    vocab_size = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    save_dsa(folder, vocab_size=vocab_size, head_scale=20.0)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_of / name, folder)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


def save_mla(folder: Path, *, vocab_size: int = 199, seed: int = 0) -> Path:
    """DeepSeek-V3: latent attention without an indexer."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        **_DEEPSEEK,
        vocab_size=vocab_size,
        num_hidden_layers=2,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


def save_llama(folder: Path, *, vocab_size: int = 199, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


SAVES = {"dsa": save_dsa, "mla": save_mla, "gqa": save_llama}  # one for each kind of attention
