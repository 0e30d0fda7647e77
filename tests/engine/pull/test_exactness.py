"""The real default model against the Llama that it was made from; a fast part of
benchmarks/default_model.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.pull import cache
from engine.pull.convert import convert, deepseek_config
from engine.pull.default_model import source_folder
from engine.pull.llama import LlamaGguf
from engine.pull.report import Report
from engine.pull.source import SMOLLM2, obtain
from tests.engine.pull import oracle

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def source(default_model: Path) -> LlamaGguf:
    home = default_model.parents[1]
    with cache.exclusive(home, lambda: None):
        path = obtain(SMOLLM2, source_folder(home), None, Report(quiet=True))
    return LlamaGguf(path)


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(default_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> list[int]:
    found: list[int] = tokenizer.encode(oracle.prose(3000)).ids[:256]
    return found


@pytest.fixture(scope="module")
def llama(source: LlamaGguf) -> Any:
    return oracle.llama(source)


@pytest.fixture(scope="module")
def rounded(default_model: Path) -> Iterator[Any]:
    """The folder's bfloat16 weights, computed in float32."""
    yield oracle.load(default_model)


def test_the_unrounded_conversion_is_the_llama(
    source: LlamaGguf, llama: Any, ids: list[int]
) -> None:
    with torch.no_grad():
        converted = oracle.deepseek(convert(source, ids[:96]), deepseek_config(source.config))
    expected = oracle.log_probs(llama, ids[:128])
    found = oracle.log_probs(converted, ids[:128])
    assert oracle.divergence(expected, found) < 2e-6
    assert oracle.agreement(expected, found) == 1.0


def test_rounded_weights_stay_close(llama: Any, rounded: Any, ids: list[int]) -> None:
    expected = oracle.log_probs(llama, ids[:128])
    assert oracle.divergence(expected, oracle.log_probs(rounded, ids[:128])) < 0.005


def test_selection_of_a_fifth_of_the_context_costs_little(rounded: Any, ids: list[int]) -> None:
    dense = oracle.perplexity(rounded, ids)
    oracle.set_topk(rounded, 48)
    selected = oracle.perplexity(rounded, ids)
    oracle.set_topk(rounded, 512)
    assert selected < 1.2 * dense


def test_it_answers_a_question(rounded: Any, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(QUESTION).ids
    assert "Paris" in tokenizer.decode(oracle.greedy(rounded, prompt, 12))
