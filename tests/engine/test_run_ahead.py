"""Decode steps that are begun before they are planned: what comes out is what comes out without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import engine.loading
from engine.attention.tables import TableAttention
from engine.run_ahead import BegunDecode
from tests.engine.client import Client
from tests.tiny import save_dsa, save_llama

OPTIONS = {"max_total_tokens": 64 * 4, "chunked_prefill_size": 37, "max_running_requests": 8}


@pytest.fixture(scope="module", params=[save_dsa, save_llama], ids=["dsa", "llama"])
def folder(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def from_page_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in the torch forms of its kernels."""
    monkeypatch.setattr(engine.loading, "local_attention", TableAttention)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step begun ahead, whether the plan took it."""
    found: list[bool] = []
    rows_of = BegunDecode.rows_of

    def spy(self, plan):
        rows = rows_of(self, plan)
        found.append(rows is not None)
        return rows

    monkeypatch.setattr(BegunDecode, "rows_of", spy)
    return found


def crowd(folder: Path, runs_ahead: bool) -> Client:
    """Requests that come by and by, some of them aborted, in a pool that is too small for all."""
    client = Client(folder, **OPTIONS)
    client.engine.leader.runner.runs_ahead = runs_ahead
    rng = random.Random(4)
    for i in range(12):
        prompt = [rng.randrange(3, 199) for _ in range(rng.choice([1, 30, 50, 60]))]
        sampling = {"max_tokens": rng.choice([1, 20, 40, 70]), "seed": i}
        sampling["temperature"] = rng.choice([0.0] * 8 + [0.8])
        if rng.random() < 0.1:
            sampling["logprobs"] = 1
        client.submit(f"r{i}", prompt, **sampling)
        for _ in range(rng.choice([0, 0, 0, 5])):
            client.step()
        if rng.random() < 0.15:
            client.abort(f"r{i}")
    client.run()
    assert client.engine.scheduler.counts["retracted"] > 0
    return client


def test_the_same_tokens_as_without(folder, taken):
    without = crowd(folder, runs_ahead=False)
    assert not taken
    ahead = crowd(folder, runs_ahead=True)
    assert ahead.tokens == without.tokens
    assert taken.count(True) > 50 and taken.count(False) > 0


def test_a_request_alone_is_always_ahead(folder, taken):
    """Also over page borders; and nothing is begun after the last token."""
    client = Client(folder, max_total_tokens=64 * 6)
    client.submit("alone", [5, 6, 7], max_tokens=150, temperature=0.0)
    client.run()
    assert taken == [True] * 148  # one by the prefill, one begun when it was planned
