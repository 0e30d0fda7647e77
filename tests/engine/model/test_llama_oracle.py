"""Dense models against transformers in float32, loaded through the real loader and driven over a
scattered, poisoned KV pool: prefill and decode logits, and 64 greedy tokens."""

from __future__ import annotations

from collections.abc import Iterator
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
from kernels.cpu import threads
from tests.engine.model.driver import Driver, Running

PROMPT_LENGTHS = (1, 63, 64, 65, 700)
NUM_GREEDY = 64
# Both sides compute in float32 and differ in the order of sums only; logits are of order 1.
TOLERANCE = 1e-4

SIZES: dict[str, Any] = {
    "vocab_size": 499,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES, head_dim=24, rope_parameters=LLAMA3),
    "llama-biased-tied": transformers.LlamaConfig(
        **SIZES, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen2": transformers.Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True),
}
SHARDED = ("llama", "qwen3")


@dataclass(frozen=True)
class Oracle:
    """What transformers says: for each prompt, the greedy tokens and the logits at every position
    of prompt and answer, from one forward over both."""

    folder: Path
    model: Model
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[torch.Tensor]  # each [len(prompt) + NUM_GREEDY, vocab_size]

    def check(self, index: int, prefill: torch.Tensor, decode: torch.Tensor) -> None:
        """prefill: logits of the prompt's last positions; decode: of the answer's positions."""
        prompt, logits = self.prompts[index], self.logits[index]
        want_prefill = logits[len(prompt) - len(prefill) : len(prompt)]
        want_decode = logits[len(prompt) :]
        assert (prefill - want_prefill).abs().max() <= TOLERANCE
        assert (decode - want_decode).abs().max() <= TOLERANCE
        tokens = [int(prefill[-1].argmax()), *decode[:-1].argmax(dim=-1).tolist()]
        assert tokens == self.answers[index]


def build(config: Any) -> Any:
    """A random model whose attention is far from uniform and whose norms and biases matter."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


@torch.no_grad()
def ask(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_GREEDY,
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer, model(torch.tensor([prompt + answer])).logits[0]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small for two: waking threads would be most of the time."""
    before = torch.get_num_threads()
    threads.configure(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CONFIGS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder: Path = tmp_path_factory.mktemp("model") / request.param
    model = build(CONFIGS[request.param])
    sharded = {"max_shard_size": "100KB"} if request.param in SHARDED else {}
    model.save_pretrained(folder, **sharded)
    assert (folder / "model.safetensors.index.json").exists() == bool(sharded)
    prompts = [torch.randint(0, SIZES["vocab_size"], (n,)).tolist() for n in PROMPT_LENGTHS]
    asked = [ask(model, prompt) for prompt in prompts]
    ours = load_model(folder, "cpu", torch.float32)
    return Oracle(folder, ours, prompts, [a for a, _ in asked], [x for _, x in asked])


def decode_and_check(
    oracle: Oracle, driver: Driver, requests: list[Running], prefills: list[torch.Tensor]
) -> None:
    """Decode all the requests together and check each."""
    for i, decode in enumerate(driver.decode(requests, oracle.answers)):
        oracle.check(i, prefills[i], decode)


def test_one_at_a_time(oracle: Oracle) -> None:
    driver = Driver(oracle.model)
    for i, prompt in enumerate(oracle.prompts):
        request = driver.start(prompt)
        (prefill,) = driver.prefill([request])
        oracle.check(i, prefill, driver.decode([request], [oracle.answers[i]])[0])


def test_batched_together(oracle: Oracle) -> None:
    driver = Driver(oracle.model)
    requests = [driver.start(prompt) for prompt in oracle.prompts]
    decode_and_check(oracle, driver, requests, driver.prefill(requests))


def test_greedy_without_being_told(oracle: Oracle) -> None:
    """Pages of another size, too."""
    driver = Driver(oracle.model, page_size=5, num_pages=1024)
    requests = [driver.start(prompt) for prompt in oracle.prompts]
    assert driver.greedy(requests, driver.prefill(requests), NUM_GREEDY) == oracle.answers


def test_chunked_beside_others(oracle: Oracle) -> None:
    """Every step takes the next chunk of each prompt that has one left."""
    driver = Driver(oracle.model)
    requests = [driver.start(prompt) for prompt in oracle.prompts]
    decode_and_check(oracle, driver, requests, driver.prefill(requests, 97))


def test_chunks_beside_decodes(oracle: Oracle) -> None:
    """The longest prompt is computed in chunks while the short ones already decode."""
    driver = Driver(oracle.model)
    requests = [driver.start(prompt) for prompt in oracle.prompts]
    *short, long = requests
    prefills = driver.prefill(short)
    parts, decoded = [], [list[torch.Tensor]() for _ in short]
    for step in range(NUM_GREEDY):
        for i, request in enumerate(short):
            request.token_ids.append(oracle.answers[i][step])
        *logits, part = driver.step([*((request, 1) for request in short), (long, 10)])
        parts.append(part)
        for own, row in zip(decoded, logits, strict=True):
            own.append(row)
    parts += driver.prefill([long])  # the last 60 tokens
    for i, own in enumerate(decoded):
        oracle.check(i, prefills[i], torch.cat(own))
    last = len(short)
    oracle.check(last, torch.cat(parts), driver.decode([long], [oracle.answers[last]])[0])


def test_after_a_prefix_hit(oracle: Oracle) -> None:
    """All whole pages but the last token's are those of an earlier request, which goes on itself
    in pages of its own."""
    driver = Driver(oracle.model)
    earlier = [driver.start(prompt) for prompt in oracle.prompts]
    driver.prefill(earlier)
    requests = [
        driver.start(prompt, like=other)
        for prompt, other in zip(oracle.prompts, earlier, strict=True)
    ]
    assert [request.num_cached for request in requests] == [0, 0, 0, 64, 640]
    driver.decode(earlier, [[3, 1, 4, 1, 5]] * len(earlier))
    decode_and_check(oracle, driver, requests, driver.prefill(requests, 41))


# What the loader makes of a checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build(CONFIGS["qwen3"]).save_pretrained(tmp_path)
    return tmp_path


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or, None, remove) tensors; a double underscore in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, folder / "model.safetensors")


MISTRAL = transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=1024)


@pytest.mark.parametrize("config", [CONFIGS["llama-biased-tied"], MISTRAL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_any_dtype_compute_in_float32(
    tmp_path: Path, config: Any, dtype: torch.dtype
) -> None:
    """transformers computes in float32 with the weights rounded to the dtype."""
    model = build(config)
    for parameter in model.parameters():  # not the buffers: rope stays in float32
        parameter.data = parameter.data.to(dtype).float()
    model.save_pretrained(tmp_path)
    driver = Driver(load_model(tmp_path, "cpu", dtype))
    prompt = list(range(100, 180))
    (logits,) = driver.prefill([driver.start(prompt)], 33)
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0]
    assert logits.dtype == torch.float32
    assert (logits - want).abs().max() <= TOLERANCE


def test_tied_embeddings_are_held_once(saved: Path) -> None:
    model = load_model(saved, "cpu", torch.float32)
    vocabulary = model.vocabulary  # type: ignore[attr-defined]
    assert vocabulary.lm_head.data_ptr() == vocabulary.embed_tokens.data_ptr()


def test_port_values(saved: Path) -> None:
    model = load_model(saved, "cpu", torch.float32, 300)
    assert (model.context_length, model.vocab_size) == (300, SIZES["vocab_size"])
    assert (model.geometry.num_layers, model.geometry.num_kv_heads) == (2, 2)
    assert model.geometry.head_dim == 24


def test_names_a_missing_tensor(saved: Path) -> None:
    edit_weights(saved, model__layers__1__self_attn__q_norm__weight=None)
    with pytest.raises(WeightError, match=r"'model\.layers\.1\.self_attn\.q_norm\.weight' is miss"):
        load_model(saved, "cpu", torch.float32)


def test_names_a_mis_shaped_tensor(saved: Path) -> None:
    edit_weights(saved, model__layers__1__mlp__up_proj__weight=torch.zeros(111, 64))
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.up_proj.*\[111, 64\].*\[112, 64\]"):
        load_model(saved, "cpu", torch.float32)


def test_ignores_tensors_that_nobody_needs(saved: Path) -> None:
    edit_weights(saved, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(12))
    load_model(saved, "cpu", torch.float32)


def test_refuses_a_sliding_window_that_slides(tmp_path: Path) -> None:
    config = transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=512)
    build(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"sliding_window 512 .*context length up to 512"):
        load_model(tmp_path, "cpu", torch.float32)
    assert load_model(tmp_path, "cpu", torch.float32, 512).context_length == 512


def test_refuses_a_window_of_some_layers(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        **SIZES, head_dim=16, use_sliding_window=True, sliding_window=128, max_window_layers=1
    )
    build(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sliding_window 128"):
        load_model(tmp_path, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' .*'silu'"),
        ({"mlp_bias": True}, "mlp_bias true .*without biases"),
    ],
)
def test_refuses_other_mlps(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    build(transformers.LlamaConfig(**SIZES, head_dim=16, **change)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, "cpu", torch.float32)
