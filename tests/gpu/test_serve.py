"""`plait serve --device cuda`: a client gets the same answer streamed and whole, with decode steps
recorded and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.served import serving
from tests.tiny import save_dsa


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3.2 whose tokens are bytes."""
    folder = save_dsa(tmp_path_factory.mktemp("model"), vocab_size=300, head_scale=20.0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i + 3 for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return folder


@pytest.mark.parametrize("graphs", ["--cuda-graphs", "--no-cuda-graphs"])
def test_streamed_and_whole(folder: Path, graphs: str) -> None:
    flags = ("--colocated", "--device", "cuda", "--dtype", "bfloat16", graphs)
    with serving(folder, *flags, "--context-length", "1024") as served:
        served.wait_ready()
        client = OpenAI(base_url=f"{served.url}/v1", api_key="none")
        asked = {"model": served.model, "prompt": "A long time ago, " * 9, "max_tokens": 200}
        asked |= {"temperature": 0, "extra_body": {"ignore_eos": True}}
        whole = client.completions.create(**asked)
        streamed = list(client.completions.create(**asked, stream=True))
        assert whole.usage.completion_tokens == 200
        assert "".join(p.choices[0].text for p in streamed if p.choices) == whole.choices[0].text
        served.stop()
