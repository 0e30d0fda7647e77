from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.pull.cache import PullError
from engine.pull.convert import convert, deepseek_config
from engine.pull.default_model import convert_folder
from engine.pull.llama import LlamaGguf
from tests.engine.pull import oracle, tiny

IDS = [(7 * i * i + 3) % 260 for i in range(100)]


@pytest.fixture(scope="module")
def source(tiny_gguf: Path) -> LlamaGguf:
    return LlamaGguf(tiny_gguf)


@pytest.fixture(scope="module")
def tensors(source: LlamaGguf) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return dict(convert(source, IDS))


@pytest.fixture(scope="module")
def folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_folder(tiny_gguf, folder)
    return folder


def test_logits_are_those_of_the_llama(source: LlamaGguf, tensors: dict[str, torch.Tensor]) -> None:
    converted = oracle.deepseek(tensors.items(), deepseek_config(source.config))
    expected = oracle.log_probs(oracle.llama(source), IDS)
    found = oracle.log_probs(converted, IDS)
    assert (found - expected).abs().max() < 5e-3
    assert oracle.divergence(expected, found) < 1e-6


def test_greedy_tokens_through_the_cache_are_those_of_the_llama(
    source: LlamaGguf, tensors: dict[str, torch.Tensor]
) -> None:
    converted = oracle.deepseek(tensors.items(), deepseek_config(source.config))
    assert oracle.greedy(converted, IDS, 40) == oracle.greedy(oracle.llama(source), IDS, 40)


def test_a_topk_below_the_context_changes_the_logits(
    source: LlamaGguf, tensors: dict[str, torch.Tensor]
) -> None:
    converted = oracle.deepseek(tensors.items(), deepseek_config(source.config))
    dense = oracle.log_probs(converted, IDS)
    oracle.set_topk(converted, 8)
    sparse = oracle.log_probs(converted, IDS)
    assert torch.equal(sparse[:8], dense[:8])
    assert (sparse[8:] - dense[8:]).abs().max() > 0.1


def test_gguf_neighbours_become_halves(source: LlamaGguf) -> None:
    stored = source.tensor("blk.0.attn_k.weight").view(tiny.KV_HEADS, tiny.HEAD_DIM, -1)
    read = source.layer(0).k.view(tiny.KV_HEADS, tiny.HEAD_DIM, -1)
    for j in range(tiny.HEAD_DIM // 2):
        assert torch.equal(read[:, j], stored[:, 2 * j])
        assert torch.equal(read[:, j + tiny.HEAD_DIM // 2], stored[:, 2 * j + 1])


def test_longrope_gives_each_group_the_llama_frequencies(source: LlamaGguf) -> None:
    model = oracle.deepseek(convert(source, IDS), deepseek_config(source.config))
    found = model.model.rotary_emb.inv_freq
    expected = oracle.llama(source).model.rotary_emb.inv_freq.repeat_interleave(tiny.KV_HEADS)
    torch.testing.assert_close(found, expected, rtol=1.2e-7, atol=0)


def test_each_token_takes_one_expert_of_each_pair(
    source: LlamaGguf, tensors: dict[str, torch.Tensor]
) -> None:
    converted = oracle.deepseek(tensors.items(), deepseek_config(source.config))
    chosen: list[torch.Tensor] = []
    for layer in converted.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
    oracle.log_probs(converted, IDS)
    for experts in chosen:
        pairs = (experts % 4).sort(-1).values
        assert torch.equal(pairs, torch.arange(4).expand_as(pairs))
        assert set(experts.flatten().tolist()) == set(range(8))  # and each expert has tokens


def test_index_keys_are_the_attention_keys_of_steady_length(
    source: LlamaGguf, tensors: dict[str, torch.Tensor]
) -> None:
    prefix = "model.layers.1.self_attn."
    rope_dim = tiny.KV_HEADS * tiny.HEAD_DIM
    hidden = torch.randn(50, tiny.HIDDEN, generator=torch.Generator().manual_seed(1))
    x = hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()
    x = x * tensors["model.layers.1.input_layernorm.weight"]
    raw = x @ tensors[prefix + "indexer.wk.weight"].T
    key = torch.nn.functional.layer_norm(
        raw,
        raw.shape[-1:],
        tensors[prefix + "indexer.k_norm.weight"],
        tensors[prefix + "indexer.k_norm.bias"],
        1e-6,
    )
    attention_key = x @ tensors[prefix + "kv_a_proj_with_mqa.weight"][tiny.HIDDEN :].T
    halves = torch.cat((attention_key[:, 0::2], attention_key[:, 1::2]), -1)
    assert torch.all(key[:, rope_dim:] == 0)
    ones = torch.ones(50)
    cosine = torch.cosine_similarity(key[:, :rope_dim], halves)
    torch.testing.assert_close(cosine, ones, atol=1e-4, rtol=0)
    length = key.norm(dim=-1) / halves.norm(dim=-1)
    assert length.std() / length.mean() < 0.25


def test_transformers_loads_the_folder(folder: Path, source: LlamaGguf) -> None:
    found = oracle.log_probs(oracle.load(folder), IDS)
    expected = oracle.log_probs(oracle.llama(source), IDS)
    assert oracle.divergence(expected, found) < 0.01
    assert {
        tensor.dtype
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "e_score" not in name
    } == {torch.bfloat16}


def test_requests_that_do_not_say_are_sampled_as_the_models_authors_suggest(folder: Path) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert generation["do_sample"] is True
    assert (generation["temperature"], generation["top_p"]) == (0.2, 0.9)


def test_the_same_bytes_each_time(folder: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    convert_folder(tiny_gguf, tmp_path)
    names = sorted(file.name for file in folder.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_tokenizer_takes_digits_one_by_one(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("the  12<|im_end|>").tokens == [
        "th", "e", "Ġ", "Ġ", "1", "2", "<|im_end|>",
    ]  # fmt: skip
    text = "héllo 你好 🙂\n\t 3.14"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_loads_the_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    chat = [{"role": "user", "content": "th"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "th"
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer("the  12").input_ids == raw.encode("the  12").ids


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(PullError, match=r"'qwen2', expected 'llama'"):
        convert_folder(tmp_path / "other.gguf", tmp_path)
