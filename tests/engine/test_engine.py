"""Scheduler, runner, attention, pool and a real model together, without processes: whatever is
batched, chunked, cached, retracted or aborted, every request gets the tokens it gets alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.client import Client
from tests.tiny import save_dsa, save_llama


@pytest.fixture(scope="module", params=[save_dsa, save_llama], ids=["dsa", "llama"])
def folder(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


def traffic(num: int, seed: int) -> dict[str, tuple[list[int], dict]]:
    """Requests of mixed lengths and parameters, many with a prefix in common."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, 199) for _ in range(n)] for n in (0, 5, 64, 130)]
    found = {}
    for i in range(num):
        own = [rng.randrange(3, 199) for _ in range(rng.choice([1, 3, 30, 63, 65, 100]))]
        sampling = {"max_tokens": rng.choice([1, 7, 20, 40, 150]), "seed": i}
        sampling["temperature"] = rng.choice([0.0, 0.0, 0.8])
        if rng.random() < 0.3:
            sampling |= {"top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
        found[f"r{i}"] = (rng.choice(prefixes) + own, sampling)
    return found


def test_mixed_traffic_in_a_small_pool_answers_as_if_alone(folder):
    requests = traffic(28, seed=1)
    alone = Client(folder, max_total_tokens=64 * 7, chunked_prefill_size=4096)
    for rid, (prompt, sampling) in requests.items():
        alone.submit(rid, prompt, **sampling)
        alone.run()
    crowd = Client(
        folder, max_total_tokens=64 * 7, chunked_prefill_size=37, max_running_requests=16
    )
    for rid, (prompt, sampling) in requests.items():
        crowd.submit(rid, prompt, **sampling)
    crowd.run()
    assert crowd.engine.scheduler.counts["retracted"] > 0
    assert crowd.engine.scheduler.counts["cached_tokens"] > 0
    assert crowd.tokens == alone.tokens


def test_aborts_at_random_leave_nothing_behind_and_disturb_no_one(folder):
    rng = random.Random(3)
    requests = traffic(24, seed=2)
    options = {"max_total_tokens": 64 * 8, "chunked_prefill_size": 37, "max_running_requests": 8}
    undisturbed = Client(folder, **options)
    crowd = Client(folder, **options)
    for client in (undisturbed, crowd):
        for rid, (prompt, sampling) in requests.items():
            client.submit(rid, prompt, **sampling)
    undisturbed.run()
    for rid in rng.sample(list(requests), 12):
        crowd.abort(rid)
        for _ in range(rng.randint(0, 6)):
            crowd.step()
    crowd.run()
    aborted = {rid for rid, end in crowd.ends.items() if end.finish_reason == "abort"}
    assert len(aborted) > 5
    for rid, tokens in crowd.tokens.items():
        whole = undisturbed.tokens[rid]
        assert tokens == (whole[: len(tokens)] if rid in aborted else whole)


def test_warm_equals_cold_and_the_hit_is_reported(folder):
    prompt = [(7 * i) % 190 + 3 for i in range(150)]
    client = Client(folder, max_total_tokens=64 * 16)
    client.submit("cold", prompt, temperature=0.0)
    client.run()
    client.submit("warm", prompt, temperature=0.0)
    client.run()
    assert client.ends["cold"].cached_tokens == 0
    assert client.ends["warm"].cached_tokens == 128
    assert client.tokens["warm"] == client.tokens["cold"]


def test_prompt_logprobs_do_not_depend_on_chunks_or_cache(folder):
    prompt = [(5 * i) % 190 + 3 for i in range(100)]
    sampling = {"max_tokens": 2, "temperature": 0.0, "prompt_logprobs": 2, "logprobs": 2}
    found = []
    for chunk in (4096, 13):
        client = Client(folder, max_total_tokens=64 * 16, chunked_prefill_size=chunk)
        client.submit("plain", prompt, temperature=0.0)
        client.run()
        client.submit("scored", prompt, **sampling)
        client.run()
        found.append(client.prompt_logprobs["scored"])
    whole, chunked = found
    assert len(whole) == len(chunked) == len(prompt)
    assert whole[0] is None and chunked[0] is None
    for a, b, token in zip(whole[1:], chunked[1:], prompt[1:], strict=True):
        assert a.token_id == b.token_id == token
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert len(a.top) == 2 and a.top[0][1] >= a.logprob - 1e-4
