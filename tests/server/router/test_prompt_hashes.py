"""A prompt's hashes are the same however they are computed."""

from __future__ import annotations

import pytest

from kvcache.events import page_hashes
from server.dispatch.fleet import Capabilities
from server.router.prompt_hashes import hash_prompts, prompt_hashes
from tests.identity import MODEL_ID


@pytest.mark.parametrize("num_tokens", [0, 2, 3, 64 * 3 - 1, 64 * 3, 64 * 3 + 1, 1000])
def test_in_short_runs_as_in_one(num_tokens: int) -> None:
    tokens = [i * i % 999 for i in range(num_tokens)]
    assert prompt_hashes(tokens, 3, b"salt") == page_hashes(tokens, 3, b"salt")


async def test_prompts_of_any_length_are_hashed_as_workers_do_and_choices_share() -> None:
    fleet = Capabilities(
        vocab_size=999, context_length=9999, page_size=3, hash_salt="salt", model_id=MODEL_ID
    )
    short, long = [1, 2, 3, 4], list(range(5000))
    hashes = await hash_prompts([short, short, long, list(short)], fleet)
    assert hashes == [page_hashes(tokens, 3, b"salt") for tokens in (short, short, long, short)]
    assert hashes[1] is hashes[0]
    assert await hash_prompts([short, long], None) == [[], []]
