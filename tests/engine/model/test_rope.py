"""Rotary frequencies: bit for bit those of transformers, and one answer for a position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.model.rope import RotaryEmbedding, mla_softmax_scale, rope_context

DIM = 32
LIMIT = 4096
POSITIONS = torch.tensor([0, 1, 2, 63, 64, 700, 4095, 100_000])

FACTORS = {
    "short_factor": [1.0 + 0.03 * i for i in range(DIM // 2)],
    "long_factor": [1.0 + 2.1 * i for i in range(DIM // 2)],
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 512,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 24, "beta_slow": 3, "attention_factor": 0.8},
    "yarn-deepseek": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7},
    "yarn-mscale-only": {**YARN, "mscale": 0.9},
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-no-scaling": {**YARN, "factor": 1.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 512, **FACTORS},
    "longrope-factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "factor": 16.0,
        **FACTORS,
    },
    "longrope-attention": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "attention_factor": 1.0,
        **FACTORS,
    },
}


def config_of(parameters: dict[str, Any], theta: float = 10_000.0, dim: int = DIM) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        max_position_embeddings=LIMIT,
        rope_parameters={"rope_theta": theta, **parameters},
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(name: str) -> None:
    config = config_of(VARIANTS[name])
    # transformers chooses longrope's long factors by the length of a request; here the served
    # context decides, and LIMIT exceeds the original length.
    want, factor = ROPE_INIT_FUNCTIONS[VARIANTS[name]["rope_type"]](config, seq_len=LIMIT)
    rotary = RotaryEmbedding.from_config(config, DIM)
    assert torch.equal(rotary.inv_freq, want)
    assert rotary.attention_factor == factor

    angles = POSITIONS[:, None].float() * want
    cos, sin = rotary(POSITIONS)
    assert torch.equal(cos, angles.cos() * factor)
    assert torch.equal(sin, angles.sin() * factor)
    assert cos.shape == sin.shape == (len(POSITIONS), DIM // 2)
    assert cos.dtype == sin.dtype == torch.float32


@pytest.mark.parametrize("name", ["default", "linear", "yarn-deepseek", "llama3", "longrope"])
def test_cos_and_sin_equal_the_rotary_module(name: str) -> None:
    config = config_of(VARIANTS.get(name, {"rope_type": "default"}))
    positions = torch.tensor([0, 1, 77, 4095])  # the last takes longrope to its long factors
    module = LlamaRotaryEmbedding(config)
    want_cos, want_sin = module(torch.zeros(1), positions[None])
    cos, sin = RotaryEmbedding.from_config(config, DIM)(positions)
    assert torch.equal(torch.cat((cos, cos), dim=-1), want_cos[0])
    assert torch.equal(torch.cat((sin, sin), dim=-1), want_sin[0])


@given(
    theta=st.floats(100, 5e6),
    half=st.integers(2, 64),
    factor=st.floats(1.0, 64.0),
    name=st.sampled_from(["linear", "dynamic", "yarn", "llama3"]),
)
@settings(deadline=None, max_examples=60)
def test_any_numbers_equal_transformers(theta: float, half: int, factor: float, name: str) -> None:
    parameters = {**VARIANTS[name], "factor": factor}
    config = config_of(parameters, theta, 2 * half)
    want, attention_factor = ROPE_INIT_FUNCTIONS[name](config)
    rotary = RotaryEmbedding.from_config(config, 2 * half)
    assert torch.equal(rotary.inv_freq, want)
    assert rotary.attention_factor == attention_factor


def test_partial_rotary_width_is_the_callers() -> None:
    config = config_of({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5})
    want, _ = ROPE_INIT_FUNCTIONS["linear"](config)
    assert torch.equal(RotaryEmbedding.from_config(config, DIM // 2).inv_freq, want)


def test_older_configs_with_rope_scaling() -> None:
    config = Qwen3Config(
        head_dim=DIM,
        max_position_embeddings=LIMIT,
        rope_theta=1e6,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    )
    want, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    rotary = RotaryEmbedding.from_config(config, DIM)
    assert torch.equal(rotary.inv_freq, want)
    assert rotary.attention_factor == factor


@pytest.mark.parametrize(("served", "name"), [(512, "short_factor"), (513, "long_factor")])
def test_longrope_follows_the_served_context(served: int, name: str) -> None:
    config = config_of(VARIANTS["longrope"])
    want, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=served)
    by_argument = RotaryEmbedding.from_config(config, DIM, context_length=served)
    config.context_length = served
    by_config = RotaryEmbedding.from_config(config, DIM)
    factors = torch.tensor(FACTORS[name])
    unscaled = 10_000.0 ** (torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
    torch.testing.assert_close(want, 1 / (factors * unscaled))
    for rotary in (by_argument, by_config):
        assert torch.equal(rotary.inv_freq, want)
        assert rotary.attention_factor == factor


@pytest.mark.parametrize("served", [100, LIMIT, LIMIT + 1, 3 * LIMIT])
def test_dynamic_follows_the_served_context(served: int) -> None:
    config = config_of(VARIANTS["dynamic"])
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=served)
    rotary = RotaryEmbedding.from_config(config, DIM, context_length=served)
    assert torch.equal(rotary.inv_freq, want)


@pytest.mark.parametrize("name", [*VARIANTS, "longrope-alike"])
def test_contexts_that_are_served_alike_have_one_number(name: str) -> None:
    alike = {**VARIANTS["longrope"], "short_factor": FACTORS["long_factor"]}
    config = config_of(VARIANTS.get(name, alike))
    by_number: dict[int, torch.Tensor] = {}
    for served in (1, 512, 513, LIMIT, LIMIT + 1, 3 * LIMIT):
        config.context_length = served
        own = RotaryEmbedding.from_config(config, DIM).inv_freq
        assert torch.equal(by_number.setdefault(rope_context(config), own), own)
    apart = [tuple(own.tolist()) for own in by_number.values()]
    assert len(set(apart)) == len(apart)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "yarn"])
def test_an_angle_depends_on_its_position_alone(name: str) -> None:
    rotary = RotaryEmbedding.from_config(config_of(VARIANTS[name]), DIM)
    positions = torch.tensor([5, 511, 512, 513, 4000])
    together = rotary(positions)
    for i in range(len(positions)):
        alone = rotary(positions[i : i + 1])
        # SIMD and scalar cosines may differ in the last bit of float32.
        torch.testing.assert_close(alone[0][0], together[0][i], rtol=0, atol=3e-7)
        torch.testing.assert_close(alone[1][0], together[1][i], rtol=0, atol=3e-7)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        VARIANTS["linear"],
        YARN,
        VARIANTS["yarn-deepseek"],
        {**YARN, "mscale_all_dim": 1.0},
        {**YARN, "factor": 1.0, "mscale_all_dim": 1.0},
    ],
)
def test_mla_softmax_scale_equals_transformers(parameters: dict[str, Any]) -> None:
    config = DeepseekV3Config(
        qk_nope_head_dim=48,
        qk_rope_head_dim=DIM,
        max_position_embeddings=LIMIT,
        rope_parameters={"rope_theta": 10_000.0, **parameters},
    )
    want = yarn_apply_mscale(config.rope_parameters, (48 + DIM) ** -0.5)
    assert mla_softmax_scale(config) == want


def test_names_an_unknown_type_and_the_known_ones() -> None:
    config = config_of({"rope_type": "default"})
    config.rope_parameters["rope_type"] = "axial"
    with pytest.raises(ValueError, match=r"'axial'.*default, linear, dynamic, yarn, longrope"):
        RotaryEmbedding.from_config(config, DIM)


def test_names_a_missing_parameter() -> None:
    config = config_of(VARIANTS["llama3"])
    del config.rope_parameters["low_freq_factor"]
    with pytest.raises(ValueError, match=r"'llama3'.*'low_freq_factor'"):
        RotaryEmbedding.from_config(config, DIM)


def test_names_a_list_of_the_wrong_length() -> None:
    config = config_of({**VARIANTS["longrope"]})
    with pytest.raises(ValueError, match="long_factor needs 8 numbers, got 16"):
        RotaryEmbedding.from_config(config, 16)


def test_refuses_rope_by_layer_type() -> None:
    config = config_of({"rope_type": "default"})
    layered = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e4}
    config.rope_parameters = layered
    with pytest.raises(ValueError, match="layer type"):
        RotaryEmbedding.from_config(config, DIM)


@pytest.mark.parametrize("dim", [0, 7, -2])
def test_refuses_odd_widths(dim: int) -> None:
    with pytest.raises(ValueError, match=f"got {dim}"):
        RotaryEmbedding.from_config(config_of({"rope_type": "default"}), dim)
