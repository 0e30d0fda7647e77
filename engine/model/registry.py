"""From a model folder to a loaded model: architecture names to classes, imported when asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Final

import torch

from engine.model.base import Model
from engine.model.config import ConfigError, load_config
from engine.model.weights import Checkpoint
from kernels.linear import fast_bf16_available

# architectures[0] of config.json -> module and class; a class has load(config, checkpoint).
_LLAMA: Final = ("engine.model.llama", "LlamaModel")
_DEEPSEEK: Final = ("engine.model.deepseek", "DeepseekModel")
ARCHITECTURES: Final[dict[str, tuple[str, str]]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": _DEEPSEEK,
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """The weights' dtype for a name; "auto" is bfloat16, except on a CPU where 16-bit weights
    would cost speed: there it is float32. Raises ValueError for another name."""
    if name == "auto":
        slow = torch.device(device).type == "cpu" and not fast_bf16_available()
        return torch.float32 if slow else torch.bfloat16
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; accepted are auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_model(
    folder: Path | str,
    device: torch.device | str,
    dtype: torch.dtype,
    context_length: int | None = None,
    *,
    keeps_fp8: bool = False,
) -> Model:
    """Load a local folder (config.json, safetensors) with its weights in `dtype` on `device`, but
    where `keeps_fp8` what is stored in block fp8, and multiplied, remains so.

    `context_length`: tokens a request may have; None: the model's max_position_embeddings. Raises
    ConfigError for a config that cannot be served and WeightError for weights that do not fit it.
    """
    config = load_config(folder, ARCHITECTURES, context_length)
    module, name = ARCHITECTURES[config.architectures[0]]
    kind = getattr(import_module(module), name)
    with Checkpoint(folder, device, dtype, keeps_fp8=keeps_fp8) as checkpoint:
        try:
            model: Model = kind.load(config, checkpoint)
        except ValueError as error:  # a value of the config that this class refuses
            raise ConfigError(f"{Path(folder) / 'config.json'}: {error}") from error
    return model
