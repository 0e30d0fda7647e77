"""The source checkpoint: a Llama model in a GGUF file, read one layer at a time.

Owns dequantisation, the undoing of GGUF's row permutation, and the plain Llama forward of one
layer that calibration needs. Knows nothing of the DeepSeek form.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F

CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_norm_eps: float

    @property
    def num_groups(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer's float32 weights, linear ones as [out_features, in_features]. Rows of q and k are
    in half-split rope order: dimension j of a head is paired with j + head_dim / 2."""

    input_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level BPE tokenizer as the GGUF carries it."""

    tokens: list[str]
    merges: list[tuple[str, str]]
    control_ids: list[int]
    bos_id: int
    eos_id: int
    unk_id: int
    pad_id: int
    pre_tokenizer: str
    chat_template: str


class LlamaGguf:
    """Random access to the tensors of `path`. Raises ValueError where it is no Llama GGUF."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(str(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path}: architecture is {architecture!r}, expected 'llama'")
        self.config = self._read_config()

    def _field(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise ValueError(f"GGUF key {key!r} is missing")
        return field.contents()

    def _read_config(self) -> LlamaConfig:
        heads = int(self._field("llama.attention.head_count"))
        hidden = int(self._field("llama.embedding_length"))
        # The file holds float32(1e-5); seven digits give back the number that was meant.
        eps = float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}")
        return LlamaConfig(
            num_layers=int(self._field("llama.block_count")),
            hidden_size=hidden,
            intermediate_size=int(self._field("llama.feed_forward_length")),
            num_heads=heads,
            num_kv_heads=int(self._field("llama.attention.head_count_kv")),
            head_dim=hidden // heads,
            vocab_size=int(self._field("llama.vocab_size")),
            context_length=int(self._field("llama.context_length")),
            rope_theta=float(self._field("llama.rope.freq_base")),
            rms_norm_eps=eps,
        )

    def vocabulary(self) -> Vocabulary:
        prefix = "tokenizer.ggml."
        types = self._field(prefix + "token_type")
        return Vocabulary(
            tokens=self._field(prefix + "tokens"),
            merges=[_split_merge(merge) for merge in self._field(prefix + "merges")],
            control_ids=[i for i, kind in enumerate(types) if kind == CONTROL_TOKEN],
            bos_id=int(self._field(prefix + "bos_token_id")),
            eos_id=int(self._field(prefix + "eos_token_id")),
            unk_id=int(self._field(prefix + "unknown_token_id")),
            pad_id=int(self._field(prefix + "padding_token_id")),
            pre_tokenizer=self._field(prefix + "pre"),
            chat_template=self._field("tokenizer.chat_template"),
        )

    def tensor(self, name: str) -> torch.Tensor:
        """The dequantised float32 tensor in [out_features, in_features] order."""
        if name not in self._tensors:
            raise ValueError(f"GGUF tensor {name!r} is missing")
        stored = self._tensors[name]
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def layer(self, index: int) -> LlamaLayer:
        def read(name: str) -> torch.Tensor:
            return self.tensor(f"blk.{index}.{name}.weight")

        config = self.config
        return LlamaLayer(
            input_norm=read("attn_norm"),
            q=_half_split(read("attn_q"), config.num_heads),
            k=_half_split(read("attn_k"), config.num_kv_heads),
            v=read("attn_v"),
            o=read("attn_output"),
            mlp_norm=read("ffn_norm"),
            gate=read("ffn_gate"),
            up=read("ffn_up"),
            down=read("ffn_down"),
        )


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _half_split(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF keeps rope pairs of Llama as neighbours (2j, 2j+1); give back (j, j + head_dim / 2)."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """[head_dim / 2] float32 angles per position."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / (config.rope_theta**exponent)


def rms_normalise(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)


def _rope(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[T, num_heads, head_dim] rotated by [T, head_dim / 2] angles, half-split pairs."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What one layer saw and made of a text of T tokens, each [T, hidden_size]."""

    attention_input: torch.Tensor  # after input_layernorm
    mlp_input: torch.Tensor  # after post_attention_layernorm
    output: torch.Tensor


def layer_forward(layer: LlamaLayer, config: LlamaConfig, hidden: torch.Tensor) -> LayerTrace:
    """Causal forward of one layer over a whole text from position 0; hidden [T, hidden_size]."""
    num_tokens = hidden.shape[0]
    x = rms_normalise(hidden, config.rms_norm_eps) * layer.input_norm
    positions = torch.arange(num_tokens, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config))
    q = _rope((x @ layer.q.T).view(num_tokens, config.num_heads, -1), angles)
    k = _rope((x @ layer.k.T).view(num_tokens, config.num_kv_heads, -1), angles)
    v = (x @ layer.v.T).view(num_tokens, config.num_kv_heads, -1)
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.repeat_interleave(config.num_groups, 1).transpose(0, 1),
        v.repeat_interleave(config.num_groups, 1).transpose(0, 1),
        is_causal=True,
    )
    hidden = hidden + mixed.transpose(0, 1).reshape(num_tokens, -1) @ layer.o.T
    m = rms_normalise(hidden, config.rms_norm_eps) * layer.mlp_norm
    out = hidden + (F.silu(m @ layer.gate.T) * (m @ layer.up.T)) @ layer.down.T
    return LayerTrace(attention_input=x, mlp_input=m, output=out)
