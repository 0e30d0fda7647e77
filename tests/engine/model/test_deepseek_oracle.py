"""DeepSeek-V2, V3, V3.2 and GLM-5 against transformers in float32, loaded through the real loader
and driven over a scattered, poisoned KV pool: prefill and decode logits, and 64 greedy tokens.

The tokens are our own greedy choice; transformers then scores prompt and answer in one forward. As
its argmax at every position is the token that follows, its own greedy answer is the same, by
induction over the positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.model.base import Model
from engine.model.config import ConfigError
from engine.model.registry import load_model
from engine.model.weights import WeightError
from tests.engine.model.driver import Driver, Running

PROMPT_LENGTHS = (1, 63, 64, 65, 700)
NUM_GREEDY = 64
# Both sides compute in float32 and differ in the order of sums only; logits are of order 1 to 10.
TOLERANCE = 1e-4
# The index scores of the last chosen and the first refused token differ by more than this for every
# query, several times what rounding can move them: the choice itself is then well defined.
MIN_GAP = 2e-6

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 20,
    "v_head_dim": 24,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
}
DSA: dict[str, Any] = {**SIZES, "index_topk": 40, "index_head_dim": 32, "index_n_heads": 32}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
CONFIGS: dict[str, Any] = {
    "v32": transformers.DeepseekV32Config(**DSA),
    "v32-no-nope": transformers.DeepseekV32Config(**{**DSA, "qk_nope_head_dim": 0}),
    "glm5": transformers.GlmMoeDsaConfig(
        **{**DSA, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4, "rms_norm_eps": 1e-5},
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "v3-yarn-biased": transformers.DeepseekV3Config(
        **SIZES, rope_parameters=YARN, attention_bias=True
    ),
    "v3-halves": transformers.DeepseekV3Config(**SIZES, rope_interleave=False),
    "v2": transformers.DeepseekV2Config(**SIZES, topk_method="group_limited_greedy"),
    "v2-lite": transformers.DeepseekV2Config(
        **{**SIZES, "q_lora_rank": None, "n_group": 1, "topk_group": 1}, topk_method="greedy"
    ),
}
SEEDS = {"v32": 9}


def build(config: Any, seed: int = 7) -> Any:
    """A random model whose attention is far from uniform and whose norms and biases matter."""
    torch.manual_seed(seed)
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm.weight" in name else 0.0, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    return model


class Gaps:
    """Stands before torch.Tensor.topk and keeps the smallest difference, over all queries, between
    the index scores at both sides of the border."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, topk: int) -> None:
        self.smallest = torch.inf
        plain = torch.Tensor.topk

        def watched(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
            if k == topk and scores.shape[-1] > k:
                last, refused = plain(scores, k + 1, dim=-1).values[..., -2:].unbind(-1)
                seen = refused > torch.finfo(scores.dtype).min  # else nothing was refused
                gaps = torch.where(seen, last - refused, torch.inf)
                self.smallest = min(self.smallest, float(gaps.min()))
            return plain(scores, k, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "topk", watched)


@dataclass(frozen=True)
class Oracle:
    model: Model
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[torch.Tensor]  # transformers', each [len(prompt) + NUM_GREEDY, vocab_size]

    def check_prefill(self, index: int, logits: torch.Tensor) -> None:
        """logits: of the prompt's last positions."""
        length = PROMPT_LENGTHS[index]
        want = self.logits[index][length - len(logits) : length]
        assert (logits - want).abs().max() <= TOLERANCE

    def check_decode(self, index: int, logits: torch.Tensor) -> None:
        """logits: of the answer's first positions."""
        want = self.logits[index][PROMPT_LENGTHS[index] :][: len(logits)]
        assert (logits - want).abs().max() <= TOLERANCE
        assert logits[:-1].argmax(-1).tolist() == self.answers[index][1 : len(logits)]

    def decode_and_check(
        self, driver: Driver, requests: list[Running], num_tokens: int = NUM_GREEDY
    ) -> None:
        """Decode the requests, one for each prompt, together."""
        answers = [answer[:num_tokens] for answer in self.answers]
        for i, logits in enumerate(driver.decode(requests, answers)):
            self.check_decode(i, logits)


@pytest.fixture(scope="module", params=CONFIGS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder: Path = tmp_path_factory.mktemp("model")
    config = CONFIGS[request.param]
    reference = build(config, SEEDS.get(request.param, 7))
    reference.save_pretrained(folder)
    model = load_model(folder, "cpu", torch.float32)
    prompts = [torch.randint(0, SIZES["vocab_size"], (n,)).tolist() for n in PROMPT_LENGTHS]
    driver = Driver(model)
    requests = [driver.start(prompt) for prompt in prompts]
    answers = driver.greedy(requests, driver.prefill(requests), NUM_GREEDY)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as monkeypatch:
        gaps = Gaps(monkeypatch, getattr(config, "index_topk", -1))
        logits = [
            reference(torch.tensor([prompt + answer]), use_cache=False).logits[0]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    assert gaps.smallest > MIN_GAP
    return Oracle(model, prompts, answers, logits)


def test_greedy_tokens(oracle: Oracle) -> None:
    for prompt, answer, logits in zip(oracle.prompts, oracle.answers, oracle.logits, strict=True):
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_one_at_a_time(oracle: Oracle) -> None:
    driver = Driver(oracle.model, shuffle=False)
    for i, prompt in enumerate(oracle.prompts):
        request = driver.start(prompt)
        oracle.check_prefill(i, driver.prefill([request])[0])
        oracle.check_decode(i, driver.decode([request], [oracle.answers[i]])[0])


@pytest.mark.parametrize("block_tokens", [8192, 96])
def test_batched_together(oracle: Oracle, block_tokens: int) -> None:
    driver = Driver(oracle.model, block_tokens=block_tokens)
    requests = [driver.start(prompt) for prompt in oracle.prompts]
    for i, logits in enumerate(driver.prefill(requests)):
        oracle.check_prefill(i, logits)
    oracle.decode_and_check(driver, requests, NUM_GREEDY if block_tokens == 8192 else 2)


@pytest.mark.parametrize("chunk", [97, 33])
def test_chunked_beside_others(oracle: Oracle, chunk: int) -> None:
    driver = Driver(oracle.model, block_tokens=150)
    requests = [driver.start(prompt) for prompt in oracle.prompts]
    for i, logits in enumerate(driver.prefill(requests, chunk)):
        oracle.check_prefill(i, logits)
    oracle.decode_and_check(driver, requests, 3)


def test_decodes_beside_prefills(oracle: Oracle) -> None:
    """Each forward holds chunks of the long prompt between decodes of the short ones."""
    driver = Driver(oracle.model)
    requests = [driver.start(prompt) for prompt in oracle.prompts]
    long, others = requests[-1], requests[:-1]
    driver.prefill(others)
    found = []
    for step in range(7):
        for request, answer in zip(others, oracle.answers, strict=False):
            request.token_ids.append(answer[step])
        work = [(request, 1) for request in others]
        work.insert(step % 5, (long, 100))
        logits = driver.step(work)
        oracle_rows = oracle.logits[-1][step * 100 :][:100]
        assert (logits.pop(step % 5) - oracle_rows).abs().max() <= TOLERANCE
        found.append(torch.cat(logits))
    for i, logits in enumerate(torch.stack(found, dim=1)):
        oracle.check_decode(i, logits)


def test_after_a_prefix_hit(oracle: Oracle) -> None:
    """The pages of an earlier request, which itself went on in another way, are read."""
    driver = Driver(oracle.model)
    requests = []
    for prompt in oracle.prompts:
        earlier = driver.start(prompt)
        driver.prefill([earlier])
        driver.decode([earlier], [[3, 1, 4]])
        requests.append(driver.start(prompt, like=earlier))
    assert [request.num_cached for request in requests] == [0, 0, 0, 64, 640]
    for i, logits in enumerate(driver.prefill(requests, 41)):
        oracle.check_prefill(i, logits)
    oracle.decode_and_check(driver, requests, 3)


@torch.inference_mode()
def test_selection_matters() -> None:
    """Without this, the DSA rows above would prove nothing: dense attention gives other logits."""
    sparse = build(CONFIGS["v32"])
    prompt = torch.randint(0, SIZES["vocab_size"], (1, 300))
    want = sparse(prompt, use_cache=False).logits
    for layer in sparse.model.layers:
        layer.self_attn.indexer.index_topk = 300
    dense = sparse(prompt, use_cache=False).logits
    assert (want - dense)[:, :40].abs().max() <= TOLERANCE
    assert (want - dense)[:, 40:].abs().max() > 1


# What the loader makes of a checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build(CONFIGS["v32"]).save_pretrained(tmp_path)
    return tmp_path


PROMPT = list(range(100, 180))


def logits_of(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    driver = Driver(load_model(folder, "cpu", dtype))
    return driver.prefill([driver.start(PROMPT)])[0]


def test_weights_in_bfloat16_compute_in_float32(tmp_path: Path) -> None:
    """The gate and weights_proj stay float32, so that the choices do not depend on the dtype."""
    model = build(CONFIGS["v32"])
    for name, parameter in model.named_parameters():
        if not name.endswith(("mlp.gate.weight", "weights_proj.weight")):
            parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    found = logits_of(tmp_path, torch.bfloat16)
    assert found.dtype == torch.float32
    assert (found - want).abs().max() <= TOLERANCE


def test_fused_experts_are_the_same(saved: Path) -> None:
    want = logits_of(saved)
    tensors = load_file(saved / "model.safetensors")
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{e}.{name}_proj.weight") for e in range(8)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{prefix}.down_proj"] = down
    save_file(tensors, saved / "model.safetensors")
    assert torch.equal(logits_of(saved), want)


def test_prediction_layers_are_skipped(saved: Path) -> None:
    want = logits_of(saved)
    tensors = load_file(saved / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.full((64, 128), torch.nan)
    save_file(tensors, saved / "model.safetensors")
    assert torch.equal(logits_of(saved), want)


def test_names_a_missing_expert(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(WeightError, match=r"'model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight'"):
        load_model(saved, "cpu", torch.float32)


def test_geometry() -> None:
    from engine.model.indexer import index_layers

    assert index_layers(CONFIGS["glm5"]) == (0, 2)
    assert index_layers(CONFIGS["v32"]) == (0, 1, 2)
    assert index_layers(CONFIGS["v2"]) == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.DeepseekV2Config(**SIZES, topk_method="noaux_tc"),
            "topk_method 'noaux_tc' .*greedy, group_limited_greedy",
        ),
        (
            transformers.GlmMoeDsaConfig(**DSA, indexer_types=["shared", "full", "full"]),
            "indexer_types .*the first one full",
        ),
    ],
)
def test_refused_configs(saved: Path, config: Any, message: str) -> None:
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(saved)
    with pytest.raises(ConfigError, match=message):
        load_model(saved, "cpu", torch.float32)
