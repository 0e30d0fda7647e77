"""A model folder's config.json as a transformers config, with the served context length settled.
Knows no architecture's fields beyond those that every decoder has; downloads and executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from engine.model.rope import rope_parameters


class ConfigError(Exception):
    """A model folder that cannot be served; names the value and what would be accepted."""


def load_config(
    folder: Path | str, known: Collection[str], context_length: int | None = None
) -> Any:
    """The transformers config of a local folder, of one of the `known` architectures.

    `config.context_length` is added to it: the tokens a request may have, prompt and answer. None
    takes max_position_embeddings; more is accepted only as far as the rope scaling reaches.

    Raises ConfigError for a folder without a valid config.json, an architecture that is not
    known, quantised weights other than block fp8, and a context length that is out of range.
    """
    path = Path(folder) / "config.json"
    raw = _read(path)
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name not in known:
        raise ConfigError(
            f"{path} names the architecture {name!r}; known are {', '.join(sorted(known))}"
        )
    _check_quantization(path, raw)
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        parameters = rope_parameters(config)
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(f"{path} is not valid: {error}") from error
    config.context_length = _context_length(config, parameters, context_length)
    return config


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} is no model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def _check_quantization(path: Path, raw: dict[str, Any]) -> None:
    quantization = raw.get("quantization_config") or {}
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if quantization and (method != "fp8" or not block):
        raise ConfigError(
            f"{path} has weights quantised by {method!r} with weight_block_size {block!r}; "
            "accepted are unquantised weights and fp8 with a weight_block_size"
        )


def _context_length(config: Any, parameters: dict[str, Any], asked: int | None) -> int:
    own = int(config.max_position_embeddings)
    factor = float(parameters.get("factor") or 1.0)
    # Some publishers leave max_position_embeddings at the length before scaling, others do not.
    longest = own
    if parameters["rope_type"] == "yarn":
        longest = max(own, int(factor * parameters["original_max_position_embeddings"]))
    elif parameters["rope_type"] in ("linear", "dynamic"):
        longest = int(factor * own)
    if asked is None:
        return own
    if not 1 <= asked <= longest:
        raise ConfigError(f"context length {asked} is out of range; the model takes 1 to {longest}")
    return asked
