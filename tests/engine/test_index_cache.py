"""Index keys in fp8: what a request is answered depends on none of the ways in which its keys came
to be in the pool. Contexts are longer than what the indexer selects."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvcache.transfer.loopback import LoopbackNetwork
from tests.engine.client import Client
from tests.engine.handoff.pair import Pair
from tests.tiny import save_dsa

PAGE = 64
FP8 = {"index_cache_dtype": "fp8_e4m3"}
LENGTHS = (5, 17, 64, 65, 130, 257, 300)


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(num_tokens)]


PROMPTS = {f"p{n}": prompt(n, n) for n in LENGTHS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dsa(tmp_path_factory.mktemp("dsa"), head_scale=20.0)


def ask(client: Client, rid: str, token_ids: list[int], **sampling: Any) -> None:
    client.submit(rid, token_ids, **{"temperature": 0.0, "logprobs": 5, **sampling})


@pytest.fixture(scope="module")
def alone(folder: Path) -> Client:
    """Each by itself, cold, its prompt in one step."""
    client = Client(folder, max_total_tokens=PAGE * 64, chunked_prefill_size=4096, **FP8)
    for rid, token_ids in PROMPTS.items():
        ask(client, rid, token_ids)
        client.run()
        client.engine.scheduler.cache.reset()
    return client


def assert_same(client: Client, rid: str, alone: Client, own: str) -> None:
    assert client.tokens[rid] == alone.tokens[own], rid
    for got, want in zip(client.logprobs[rid], alone.logprobs[own], strict=True):
        assert dict(got.top) == pytest.approx(dict(want.top), abs=1e-3), rid


def test_the_option_changes_what_the_pool_holds_and_what_is_counted(folder, alone) -> None:
    plain = Client(folder, max_total_tokens=PAGE * 64)
    # Of 3 layers: 48 numbers of latent and rope key, 32 of an index key.
    assert plain.engine.bytes_per_token == 3 * 4 * (48 + 32)
    assert alone.engine.bytes_per_token == 3 * (4 * 48 + 32 + 4)
    assert alone.engine.model_id.numbers.index_keys == "fp8_e4m3"
    assert plain.engine.model_id.numbers.index_keys == "float32"
    for client in (plain, alone):
        pool = client.engine.leader.pool
        assert pool.num_bytes == 65 * PAGE * client.engine.bytes_per_token
    for rid, token_ids in PROMPTS.items():
        ask(plain, rid, token_ids)
        plain.run()
    # Up to 16 tokens all are selected, whatever their keys; a longer one's choice is another's.
    first = {rid: [dict(c.logprobs[rid][0].top) for c in (plain, alone)] for rid in PROMPTS}
    assert first["p5"][0] == pytest.approx(first["p5"][1], abs=1e-4)
    assert any(a != pytest.approx(b, abs=1e-4) for a, b in first.values())


@pytest.mark.parametrize("chunk", [1, 50, 128])
def test_chunked_equals_whole_and_warm_equals_cold(folder, alone, chunk) -> None:
    client = Client(folder, max_total_tokens=PAGE * 64, chunked_prefill_size=chunk, **FP8)
    for turn in ("", " again"):
        for rid, token_ids in PROMPTS.items():
            ask(client, rid + turn, token_ids)
        client.run()  # together
        for rid in PROMPTS:
            assert_same(client, rid + turn, alone, rid)
    assert client.ends["p300 again"].cached_tokens == 256


@pytest.mark.parametrize(
    "options",
    [
        {"cp_size": 3, "cp_mode": "round-robin-split", "cp_stream_block_tokens": 64},
        {"cp_size": 2, "shared_kv": False, "cp_stream_block_tokens": 128},
    ],
    ids=str,
)
def test_ranks_equal_one(folder, alone, options) -> None:
    client = Client(folder, max_total_tokens=PAGE * 16, chunked_prefill_size=100, **FP8, **options)
    try:
        for turn in ("", " again"):
            for rid, token_ids in PROMPTS.items():
                ask(client, rid + turn, token_ids)
            client.run()
            for rid in PROMPTS:
                assert_same(client, rid + turn, alone, rid)
    finally:
        client.close()


@pytest.mark.parametrize("cp_size", [1, 2])
def test_evicted_to_the_host_and_back_equals_never_evicted(folder, alone, cp_size) -> None:
    client = Client(
        folder,
        max_total_tokens=PAGE * 8 // cp_size,
        hicache=True,
        hicache_ratio=3.0,
        chunked_prefill_size=100,
        cp_size=cp_size,
        **FP8,
    )
    try:
        for turn in ("", " again"):
            for rid in ("p257", "p300", "p130"):
                ask(client, rid + turn, PROMPTS[rid])
                client.run()
                assert_same(client, rid + turn, alone, rid)
        assert client.engine.scheduler.cache.counts["loaded_back_tokens"] >= 2 * 4 * PAGE
        for report in client.engine.host_reports.values():
            page_bytes = PAGE * client.engine.bytes_per_token
            assert report.num_bytes["load_back"] % page_bytes == 0
    finally:
        client.close()


@pytest.fixture
def over_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    network = LoopbackNetwork()
    monkeypatch.setattr("engine.loading.MooncakeEngine", lambda host, protocol: network.engine())


@pytest.mark.usefixtures("over_the_twin")
def test_handed_over_equals_colocated(folder, alone) -> None:
    options = {"max_total_tokens": PAGE * 32, "chunked_prefill_size": 100, **FP8}
    pair = Pair(folder, prefill=options, decode=options)
    for rid, token_ids in PROMPTS.items():
        pair.submit(rid, token_ids, temperature=0.0)
    pair.run()
    assert pair.from_decode == set(PROMPTS)
    for rid in PROMPTS:
        assert pair.tokens(rid) == alone.tokens[rid]
    pair.assert_all_given_back()
    pair.close()


@pytest.mark.usefixtures("over_the_twin")
@pytest.mark.parametrize("prefill", [FP8, {}])
def test_a_hand_off_between_keys_of_two_kinds_is_refused_with_both_named(folder, prefill) -> None:
    options = {"max_total_tokens": PAGE * 32}
    decode = {} if prefill else FP8
    pair = Pair(folder, prefill={**options, **prefill}, decode={**options, **decode})
    pair.submit("r", prompt(100, 1), temperature=0.0)
    pair.run()
    (back,) = pair.hand_backs
    in_fp8, plain = "2304 bytes of float8_e4m3fn", "8192 bytes of float32"
    assert f"index_keys 3 x {in_fp8 if prefill else plain}]" in back.reason.split("there")[0]
    assert f"index_keys 3 x {plain if prefill else in_fp8}]" in back.reason.split("there")[1]
    assert sum(pair.prefill.inbox.refused.values()) == 1
    pair.assert_all_given_back()
    pair.close()
