"""A prompt's hashes are the same however they are computed."""

from __future__ import annotations

import pytest

from kvcache.events import page_hashes
from server.router.prompt_hashes import prompt_hashes


@pytest.mark.parametrize("num_tokens", [0, 2, 3, 64 * 3 - 1, 64 * 3, 64 * 3 + 1, 1000])
def test_in_short_runs_as_in_one(num_tokens: int) -> None:
    tokens = [i * i % 999 for i in range(num_tokens)]
    assert prompt_hashes(tokens, 3, b"salt") == page_hashes(tokens, 3, b"salt")
