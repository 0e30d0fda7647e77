"""`plait prefill-check` with real groups: what one rank computes, two compute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def check(model: Path, out: Path, *flags: str) -> dict:
    command = [sys.executable, "-m", "server", "prefill-check", "--model", str(model)]
    command += ["--dtype", "float32", "--json", str(out), "--tokens", "4", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "next token" in done.stdout
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def model(default_model: Path, tmp_path_factory) -> Path:
    from tests.tiny import save_dsa_chat

    return save_dsa_chat(tmp_path_factory.mktemp("model"), default_model)


def test_two_ranks_find_what_one_finds_with_half_the_pool_each(model, tmp_path):
    flags = ("--prompt-tokens", "300", "--cp-stream-block-tokens", "64")
    one = check(model, tmp_path / "1.json", *flags, "--max-total-tokens", "512")
    two = check(
        model, tmp_path / "2.json", *flags, "--max-total-tokens", "256", "--prefill-cp-size", "2"
    )
    assert one["greedy"] == two["greedy"]
    assert [t for t, _, _ in one["next_token"]] == [t for t, _, _ in two["next_token"]]
    for (_, _, a), (_, _, b) in zip(one["next_token"], two["next_token"], strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert one["logical_tokens"] == two["logical_tokens"] == 512
    assert two["physical_tokens_per_rank"] == 256
    assert two["used_pages_by_rank"] == [2, 2]  # the 4 full pages of 303 tokens
    assert one["gathered_bytes_by_rank"] == [0]
    assert len(two["gathered_bytes_by_rank"]) == 2 and min(two["gathered_bytes_by_rank"]) > 0


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--prompt-tokens", "0"), 2, "--prompt-tokens 0: expected a whole number from 1 to 1"),
        (("--prompt-tokens", "10000001"), 2, "expected a whole number from 1 to 10000000"),
        (("--tokens", str(2**64), "--max-total-tokens", "128"), 1, "the context length of 128"),
        (("--tokens", "0"), 2, "--tokens 0: expected a whole number, 1 or more"),
        (("--prompt", ""), 2, "--prompt: expected text"),
        (("--enable-nsa-prefill-cp-shared-kv",), 1, "give --prefill-cp-size 2 or more"),
        (
            ("--prompt-tokens", "100", "--max-total-tokens", "128", "--tokens", "90"),
            1,
            "the context length of 128",
        ),
    ],
)
def test_what_cannot_be_checked_is_said(model, flags, code, said):
    command = [sys.executable, "-m", "server", "prefill-check", "--model", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
