"""Model folders: what is refused and what the message names; dtypes and the served context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.config import ConfigError, load_config
from engine.model.registry import ARCHITECTURES, load_model, resolve_dtype

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}


def folder_with(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    return folder


def load(folder: Path, context_length: int | None = None) -> Any:
    return load_config(folder, ARCHITECTURES, context_length)


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=f"{folder} is no model folder.*config.json"):
            load_model(folder, "cpu", torch.float32)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff"])
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize("named", [["GPT2LMHeadModel"], [], None, "LlamaForCausalLM", [3], [{}]])
def test_an_unknown_architecture_lists_the_known(tmp_path: Path, named: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder_with(tmp_path, architectures=named))
    for name in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Qwen3ForCausalLM"):
        assert name in str(caught.value)


def test_values_that_transformers_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)config\.json is not valid: .*65"):
        load(folder_with(tmp_path, hidden_size=65))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: pass\n")
    folder_with(tmp_path, model_type="made-up", auto_map={"AutoConfig": "custom.C"})
    with pytest.raises(ConfigError):
        load(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}, {"bits": 4}],
)
def test_refuses_other_quantised_weights(tmp_path: Path, quantization: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="accepted are unquantised weights and fp8"):
        load(folder_with(tmp_path, quantization_config=quantization))


def test_accepts_block_fp8(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    load(folder_with(tmp_path, quantization_config=fp8))


@pytest.mark.parametrize(("asked", "served"), [(None, 4096), (1, 1), (4096, 4096)])
def test_the_served_context(tmp_path: Path, asked: int | None, served: int) -> None:
    assert load(folder_with(tmp_path), asked).context_length == served


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            4096,
        ),
    ],
)
def test_the_longest_context(tmp_path: Path, rope: dict[str, Any], longest: int) -> None:
    folder_with(tmp_path, rope_parameters={"rope_theta": 1e4, **rope})
    assert load(tmp_path, longest).context_length == longest
    for asked in (0, -1, longest + 1):
        with pytest.raises(ConfigError, match=f"context length {asked} .* 1 to {longest}"):
            load(tmp_path, asked)


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("float32", "cpu") == torch.float32
    assert resolve_dtype("float16", "cuda") == torch.float16
    assert resolve_dtype("auto", "cuda:1") == torch.bfloat16
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("engine.model.registry.fast_bf16_available", lambda fast=fast: fast)
        assert resolve_dtype("auto", "cpu") == dtype
    with pytest.raises(ValueError, match=r"'int4' .* auto, float32, bfloat16, float16"):
        resolve_dtype("int4", "cpu")
