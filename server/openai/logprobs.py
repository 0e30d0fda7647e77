"""Log-probabilities in the API's two shapes: entries (chat), parallel lists (completions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.types import TokenLogprob
from server.detokenizer import TokenBytes, Utf8Stream

LOWEST = -9999.0  # JSON has no infinity


def chat_entries(logprobs: Sequence[TokenLogprob], table: TokenBytes) -> list[dict[str, Any]]:
    return [
        {
            **_entry(item.token_id, item.logprob, table),
            "top_logprobs": [_entry(token_id, value, table) for token_id, value in item.top],
        }
        for item in logprobs
    ]


def _entry(token_id: int, logprob: float, table: TokenBytes) -> dict[str, Any]:
    spelled = table.spell(token_id)
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": max(logprob, LOWEST),
        "bytes": list(spelled),
    }


class CompletionLogprobs:
    """The lists of one choice. Offsets count characters of the returned text, its echoed prompt
    included, so one object must see all tokens of its choice in order."""

    def __init__(self, table: TokenBytes, skip_special_tokens: bool = True) -> None:
        self._table = table
        self._utf8 = Utf8Stream(table, skip_special_tokens)
        self._num_chars = 0

    def lists(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        """For the next tokens; null where a token has no log-probability (a prompt's first)."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += len(self._utf8.feed(token_id))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if it is None else max(it.logprob, LOWEST) for it in logprobs],
            "top_logprobs": [None if it is None else self._top(it) for it in logprobs],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one, as the reference says."""
        pairs = [*item.top, (item.token_id, item.logprob)]
        return {self._name(token_id): max(value, LOWEST) for token_id, value in pairs}

    def _name(self, token_id: int) -> str:
        """The token's text; where that is no whole character, its bytes, so names stay apart."""
        spelled = self._table.spell(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
