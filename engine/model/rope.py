"""Rotary frequencies of a model's config. Knows the scaling variants by their `rope_type`; knows no
layout of pairs (kernels/rope.py) and no request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch


class RotaryEmbedding:
    """positions [T] -> (cos, sin), each [T, dim / 2] float32, times the attention factor.

    A token's angle depends on its position alone, never on who shares its batch or how long its
    request has become: keys stay in the cache, so a chunked, decoded or prefix-hit token must get
    the angle that a one-shot prefill gives it. See `from_config` for what that decides.
    """

    __slots__ = ("attention_factor", "inv_freq")

    def __init__(self, inv_freq: torch.Tensor, attention_factor: float = 1.0) -> None:
        self.inv_freq = inv_freq  # [dim / 2] float32
        self.attention_factor = attention_factor

    @classmethod
    def from_config(
        cls,
        config: Any,
        dim: int,
        *,
        context_length: int | None = None,
        device: torch.device | str = "cpu",
    ) -> RotaryEmbedding:
        """Frequencies for `dim` rotary dimensions of a transformers config.

        Two variants change with the length of a request in transformers, which re-computes them
        in the middle of a generation and leaves the cached keys as they are. Here the *served*
        context length decides once, for every request: `context_length`, else what load_config
        put into `config.context_length`, else max_position_embeddings.

        - longrope: long_factor where the served context exceeds original_max_position_embeddings,
          else short_factor. Serve with that context length to get the short factors.
        - dynamic: the base that the served context needs; up to max_position_embeddings it is the
          unscaled one.

        Raises ValueError for an unknown rope_type, a missing parameter and a wrong factor list.
        """
        if dim <= 0 or dim % 2:
            raise ValueError(f"rotary dimensions must be even and positive, got {dim}")
        parameters = rope_parameters(config)
        rope_type = parameters["rope_type"]
        variant = _VARIANTS.get(rope_type)
        if variant is None:
            raise ValueError(f"rope_type {rope_type!r} is unknown; known: {', '.join(_VARIANTS)}")
        served = context_length or getattr(config, "context_length", None)
        limit = int(config.max_position_embeddings)
        try:
            inv_freq, attention_factor = variant(parameters, dim, served or limit, limit)
        except KeyError as error:
            raise ValueError(f"rope_type {rope_type!r} needs the parameter {error}") from error
        return cls(inv_freq.to(device), attention_factor)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.float().unsqueeze(-1) * self.inv_freq  # [T, dim / 2]
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin


def rope_parameters(config: Any) -> dict[str, Any]:
    """The config's rope parameters as one flat dict with `rope_type` and `rope_theta`.

    Reads today's `rope_parameters` and the older `rope_scaling` with a separate `rope_theta`, as
    transformers 5 standardises them. Raises ValueError for parameters nested by layer type.
    """
    config.standardize_rope_params()
    parameters = dict(config.rope_parameters or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError(f"rope parameters by layer type are not supported: {sorted(parameters)}")
    if parameters.get("rope_theta") is None:
        raise ValueError("the config has no rope_theta")
    return parameters


def rope_context(config: Any) -> int:
    """The shortest served context with the frequencies of `config.context_length`; 0 where they are
    those of every shorter one."""
    p, served = rope_parameters(config), int(config.context_length)
    if p["rope_type"] == "dynamic":
        return served if served > config.max_position_embeddings else 0
    if p["rope_type"] == "longrope" and p["long_factor"] != p["short_factor"]:
        original = int(p["original_max_position_embeddings"])
        return original + 1 if served > original else 0
    return 0


def mla_softmax_scale(config: Any) -> float:
    """The softmax scale of multi-head latent attention: (nope + rope)**-0.5, times the square of
    yarn's magnitude where the config scales its rope and sets mscale_all_dim (DeepSeek-V2)."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    parameters = rope_parameters(config)
    mscale_all_dim = parameters.get("mscale_all_dim")
    if parameters["rope_type"] != "default" and mscale_all_dim:
        mscale = _yarn_mscale(parameters["factor"], mscale_all_dim)
        scale = scale * mscale * mscale
    return scale


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _powers(base: float, dim: int) -> torch.Tensor:
    """base**(2i / dim) for each pair i, [dim / 2] float32."""
    powers: torch.Tensor = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return powers


# A variant: (parameters, dim, served context, max_position_embeddings) -> (inv_freq, attention
# factor). The order of the float32 operations is transformers', so that the bits agree.
_Variant = Callable[[Mapping[str, Any], int, int, int], tuple[torch.Tensor, float]]


def _default(p: Mapping[str, Any], dim: int, served: int, limit: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(p["rope_theta"], dim), 1.0


def _linear(p: Mapping[str, Any], dim: int, served: int, limit: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(p["rope_theta"], dim) / p["factor"], 1.0


def _dynamic(p: Mapping[str, Any], dim: int, served: int, limit: int) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling of the base, for a context longer than the model was trained on."""
    factor, length = p["factor"], max(served, limit)
    growth = (factor * length / limit) - (factor - 1)
    return 1.0 / _powers(p["rope_theta"] * growth ** (dim / (dim - 2)), dim), 1.0


def _yarn(p: Mapping[str, Any], dim: int, served: int, limit: int) -> tuple[torch.Tensor, float]:
    """Peng et al., YaRN, section 3.2: fast pairs keep their frequency, slow ones are interpolated,
    with a linear ramp between."""
    base, original = p["rope_theta"], p["original_max_position_embeddings"]
    factor = p["factor"] if p["factor"] is not None else limit / original

    def pair_of(rotations: float) -> float:  # the pair that turns so often within the original
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair_of(p.get("beta_fast") or 32), pair_of(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    powers = _powers(base, dim)
    inv_freq = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept

    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = p.get("mscale"), p.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor)
    return inv_freq, float(attention_factor)


def _longrope(
    p: Mapping[str, Any], dim: int, served: int, limit: int
) -> tuple[torch.Tensor, float]:
    """Ding et al., LongRoPE: one searched factor a pair, for short and for long contexts."""
    original = p["original_max_position_embeddings"]
    name = "long_factor" if served > original else "short_factor"
    factors = torch.tensor(p[name], dtype=torch.float32)
    if factors.shape != (dim // 2,):
        raise ValueError(f"longrope's {name} needs {dim // 2} numbers, got {len(p[name])}")
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        factor = p["factor"] if p.get("factor") is not None else limit / original
        attention_factor = (
            math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        )
    return 1.0 / (factors * _powers(p["rope_theta"], dim)), float(attention_factor)


def _llama3(p: Mapping[str, Any], dim: int, served: int, limit: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, smooth between."""
    factor, original = p["factor"], p["original_max_position_embeddings"]
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    inv_freq = 1.0 / _powers(p["rope_theta"], dim)
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, between)
    return torch.where(wavelength < original / high, inv_freq, scaled), 1.0


_VARIANTS: Final[dict[str, _Variant]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
