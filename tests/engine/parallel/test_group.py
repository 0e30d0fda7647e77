"""Groups of real processes: N ranks answer as one does, for every kind of model and batch."""

from __future__ import annotations

import pytest

from tests.engine.client import Client
from tests.tiny import SAVES

PAGES = 8  # of 64 tokens, that one rank holds


def prompt(num: int, seed: int) -> list[int]:
    return [(7 * i * i + 13 * i + 31 * seed) % 190 + 3 for i in range(num)]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    return SAVES[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(folder):
    """One rank with room for everything, asked one request at a time."""
    return Client(folder, max_total_tokens=64 * PAGES * 16, chunked_prefill_size=4096)


def ask(client: Client, rid: str, token_ids: list[int], num: int = 6) -> None:
    client.submit(rid, token_ids, max_tokens=num, temperature=0.0, logprobs=20)


def assert_same(group: Client, alone: Client) -> None:
    for rid, token_ids in group.prompts.items():
        key = f"{len(alone.prompts)}"
        alone.submit(key, token_ids, **group.sampling[rid])
        alone.run()
        assert group.tokens[rid] == alone.tokens[key], rid
        for got, want in zip(group.logprobs[rid], alone.logprobs[key], strict=True):
            # float32 sums in another order: about 1e-5 on these logits
            assert dict(got.top) == pytest.approx(dict(want.top), abs=1e-4), rid
        scores = [
            [e.logprob for e in c.prompt_logprobs.get(r, [])[1:]]
            for c, r in ((group, rid), (alone, key))
        ]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4), rid


@pytest.mark.parametrize(
    ("folder", "size", "mode", "block_tokens"),
    [
        ("dsa", 2, "in-seq-split", 64),
        ("dsa", 2, "round-robin-split", None),
        ("dsa", 4, "in-seq-split", 192),
        ("mla", 2, "round-robin-split", None),
        ("mla", 3, "in-seq-split", 64),
        ("gqa", 2, "round-robin-split", None),
        ("gqa", 3, "in-seq-split", 192),
    ],
    indirect=["folder"],
)
def test_ranks_answer_as_one(folder, alone, size, mode, block_tokens):
    group = Client(
        folder,
        max_total_tokens=64 * PAGES,
        chunked_prefill_size=100,
        cp_size=size,
        cp_mode=mode,
        cp_stream_block_tokens=block_tokens,
    )
    try:
        # Prompts of a few tokens and of unequal odd lengths in one batch, in chunks, cold.
        # 16 and 17 tokens are just within and just beyond what the indexer selects.
        for length in [*range(1, 2 * size + 2), 16, 17, 33, 101, 257]:
            ask(group, f"{length}", prompt(length, length))
        group.run()
        group.submit(
            "scored",
            prompt(130, 7),
            max_tokens=6,
            seed=3,
            prompt_logprobs=0,
            repetition_penalty=1.2,
        )
        # A prefix hit, beside a cold request.
        ask(group, "hit", [*prompt(257, 257)[:200], 5, 6, 7])
        ask(group, "cold", prompt(70, 1))
        group.run()
        assert group.ends["hit"].cached_tokens == 192
        # More than one rank can hold, with less than a page to spare in the group.
        long = 64 * PAGES * size - 20
        ask(group, "long", prompt(long, 3), num=2)
        group.run()
        assert long > 64 * PAGES
        assert_same(group, alone)
        used = group.engine.scheduler.cache.device.used_by_lane()
        assert max(used) - min(used) <= 1
    finally:
        group.close()


@pytest.mark.parametrize("folder", SAVES, indirect=True)
def test_replicated_kv_answers_the_same_with_the_capacity_of_one_rank(folder, alone):
    group = Client(
        folder,
        max_total_tokens=64 * PAGES,
        chunked_prefill_size=100,
        cp_size=2,
        shared_kv=False,
        cp_stream_block_tokens=128,
    )
    try:
        assert group.engine.capacity.logical_tokens == 64 * PAGES
        for length in (1, 101, 257):
            ask(group, f"{length}", prompt(length, length))
        group.run()
        ask(group, "hit", [*prompt(257, 257)[:200], 5, 6, 7])
        group.run()
        assert group.ends["hit"].cached_tokens == 192
        assert_same(group, alone)
    finally:
        group.close()
