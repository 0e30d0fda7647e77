"""Token counts of one HTTP request, equal in streams and bodies."""

from __future__ import annotations

from typing import Any

from server.answer import Delta


class Usage:
    """`num_prompt_tokens` counts each prompt once, whatever `n` is; so do cached tokens."""

    def __init__(self, num_prompt_tokens: int, n: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._num_host_tokens = 0  # those of them that came from the host tier

    def add(self, delta: Delta) -> None:
        self._num_output_tokens += delta.num_tokens
        if delta.choice % self._n == 0:
            self._num_cached_tokens += delta.cached_tokens
            self._num_host_tokens += delta.cached_host_tokens

    def body(self) -> dict[str, Any]:
        """OpenAI's fields, and one of ours: `cached_tokens_by_tier` sums up to `cached_tokens`."""
        by_tier = {
            "device": self._num_cached_tokens - self._num_host_tokens,
            "host": self._num_host_tokens,
        }
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self._num_cached_tokens,
                "cached_tokens_by_tier": by_tier,
            },
            # All output is text of the answer: no other kind is told apart.
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
