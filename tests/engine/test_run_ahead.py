"""Decode steps that are begun before they are planned: what comes out is what comes out without."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import engine.loading
from engine.attention.tables import TableAttention
from engine.plan import Extend, Start, StepPlan
from engine.run_ahead import BegunDecode, TokenRead
from engine.types import SamplingParams
from tests.engine.apart import run_apart
from tests.engine.client import Client
from tests.tiny import save_dsa, save_llama

OPTIONS = {"chunked_prefill_size": 37, "max_running_requests": 8}
FEW_PAGES, MANY_PAGES = 4, 16  # requests are retracted; up to six run at once


@pytest.fixture(scope="module", params=[save_dsa, save_llama], ids=["dsa", "llama"])
def folder(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def from_page_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in the torch forms of its kernels."""
    monkeypatch.setattr(engine.loading, "local_attention", TableAttention)


def crowd(folder: Path, runs_ahead: bool, num_pages: int, **options) -> Client:
    """Requests that come by and by, some of them aborted, in a pool that is too small for all and
    holds nothing but NaN at first; with prefixes in common, and every way to choose and to end."""
    client = Client(folder, max_total_tokens=64 * num_pages, **OPTIONS, **options)
    for buffer in client.engine.leader.pool.buffers():
        buffer.fill_(torch.nan)
    client.engine.leader.runner.runs_ahead = runs_ahead
    rng = random.Random(4)
    prefix = [rng.randrange(3, 199) for _ in range(64)]
    for i in range(20):
        prompt = [rng.randrange(3, 199) for _ in range(rng.choice([1, 30, 50, 63, 64, 65]))]
        prompt = prefix + prompt if rng.random() < 0.3 else prompt
        sampling = {"max_tokens": rng.choice([1, 2, 20, 40, 70]), "seed": i}
        sampling["temperature"] = rng.choice([0.0] * 5 + [0.8] * 4)
        if rng.random() < 0.1:
            sampling["logprobs"] = 1
        if rng.random() < 0.4:
            sampling["stop_token_ids"] = tuple(rng.sample(range(3, 199), 12))
            sampling["min_tokens"] = rng.choice([0, 0, 4])
        if rng.random() < 0.1:
            sampling["frequency_penalty"] = 0.5
        if rng.random() < 0.3:
            sampling |= {"top_p": 0.9, "top_k": rng.choice([0, 1, 50])}
        client.submit(f"r{i}", prompt, **sampling)
        for _ in range(rng.choice([0, 0, 0, 5])):
            client.step()
        if rng.random() < 0.15:
            client.abort(f"r{i}")
    client.run()
    assert num_pages == MANY_PAGES or client.engine.scheduler.counts["retracted"] > 0
    assert {end.finish_reason for end in client.ends.values()} == {"stop", "length", "abort"}
    return client


@pytest.fixture(scope="module")
def answers(folder) -> dict[int, dict[str, list[int]]]:
    """Of the crowd by the size of its pool, each step planned before it is begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.loading, "local_attention", TableAttention)
        clients = {n: crowd(folder, False, n) for n in (FEW_PAGES, MANY_PAGES)}
    assert not any(client.engine.leader.runner.ahead_counts for client in clients.values())
    return {n: client.tokens for n, client in clients.items()}


def test_the_same_tokens_as_without(folder, answers):
    ahead = crowd(folder, True, FEW_PAGES)
    assert ahead.tokens == answers[FEW_PAGES]
    counts = ahead.engine.leader.runner.ahead_counts
    assert counts["taken"] > 50 and counts["dropped"] > 0


@pytest.mark.parametrize(
    ("cuda_graphs", "num_pages"), [(True, FEW_PAGES), (True, MANY_PAGES), (False, MANY_PAGES)]
)
def test_the_same_tokens_on_a_device_that_is_apart(
    folder, answers, cuda_graphs, num_pages, monkeypatch
):
    """Batches of 3, 5 and 6 are padded there, with requests of a page that was never written."""
    run_apart(monkeypatch)
    ahead = crowd(folder, True, num_pages, cuda_graphs=cuda_graphs)
    assert ahead.tokens == answers[num_pages]
    assert ahead.engine.leader.runner.ahead_counts["taken"] > 0


def test_a_request_alone_is_always_ahead(folder, monkeypatch):
    """Also over page borders, and where it has just enough context to select from it; nothing is
    begun after the last token. With recorded steps as without."""
    answers = []
    for is_apart in (False, True):
        if is_apart:
            run_apart(monkeypatch)
        client = Client(folder, max_total_tokens=64 * 6)
        client.submit("alone", [5, 6, 7], max_tokens=150, temperature=0.0)
        client.run()
        # One token is the prefill's, one is of a step begun when it was planned.
        assert client.engine.leader.runner.ahead_counts == {"taken": 148}
        assert client.engine.leader.runner._ahead is None
        answers.append(client.tokens["alone"])
    assert answers[0] == answers[1]


def test_a_choice_of_more_tokens_than_a_recorded_step_can_make_is_not_recorded(
    tmp_path, monkeypatch, caplog
):
    run_apart(monkeypatch)
    caplog.set_level("INFO", logger="plait.graphs")
    said = []
    for topk in (16384, 16385):
        caplog.clear()
        folder = save_dsa(tmp_path / str(topk), index_topk=topk)
        client = Client(folder, max_total_tokens=64 * MANY_PAGES, **OPTIONS)
        client.submit("r", [5, 6, 7], max_tokens=5)
        client.run()
        assert client.ends["r"].finish_reason == "length"
        said.append(caplog.messages)
    (recorded,), (not_recorded,) = said
    assert recorded.startswith("recorded 8 graphs of decode steps")
    assert "not recorded as CUDA graphs: the model's index_topk is 16385, at most 16384" in (
        not_recorded
    )


def test_a_request_that_has_yet_to_get_its_page_is_not_computed_ahead(folder):
    """The younger has taken the last page and gives it up when the older one needs it: the plan is
    then for just the token that a step begun before would have written to nowhere."""
    answers = []
    for runs_ahead in (False, True):
        client = Client(folder, max_total_tokens=64 * 3, **OPTIONS)
        for buffer in client.engine.leader.pool.buffers():
            buffer.fill_(torch.nan)
        client.engine.leader.runner.runs_ahead = runs_ahead
        client.submit("older", list(range(3, 43)), max_tokens=60, temperature=0.0)
        client.submit("younger", list(range(50, 110)), max_tokens=60, temperature=0.0)
        client.run()
        assert client.engine.scheduler.counts["retracted"] == 1
        answers.append(client.tokens)
    assert answers[0] == answers[1]


def test_pages_are_settled_once_the_device_has_done_all_it_was_given(folder, monkeypatch):
    """Also where nothing was begun ahead: a chunk of a prompt samples nothing, so that nobody has
    waited for it."""
    client = Client(folder, max_total_tokens=64 * FEW_PAGES, **OPTIONS)
    client.submit("long", list(range(3, 103)))
    client.step()
    runner = client.engine.leader.runner
    assert runner._ahead is None
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(runner, "_mesh", SimpleNamespace(device=torch.device("cuda")))
    client.engine.leader.settle()
    assert waited == [True]


def test_a_plan_takes_what_was_begun_for_the_same_tokens_and_nothing_else():
    tokens = torch.tensor([50, 51, 52])
    begun = BegunDecode((4, 2, 7), (10, 3, 5), tokens, TokenRead(tokens))

    def rows(*extends: Extend, starts: tuple[Start, ...] = ()) -> list[int] | None:
        return begun.rows_of(StepPlan(step=1, starts=list(starts), extends=list(extends)))

    def extend(req_index: int, start: int, **fields) -> Extend:
        return Extend(**{"req_index": req_index, "token_ids": [9], "start": start, **fields})

    assert rows(extend(7, 5), extend(4, 10)) == [2, 0]
    assert rows(extend(4, 10), extend(2, 3), extend(7, 5, pages=[3])) == [0, 1, 2]
    assert rows(extend(4, 10), extend(2, 4)) is None  # another position
    assert rows(extend(4, 10), extend(3, 3)) is None  # another request
    assert rows(extend(4, 10, token_ids=[9, 9])) is None
    assert rows(extend(4, 10, targets=[9])) is None
    assert rows(extend(4, 10, samples=False)) is None
    start = Start(req_index=2, sampling=SamplingParams(max_tokens=1), prompt_ids=[1])
    assert rows(extend(4, 10), extend(2, 3), starts=(start,)) is None
