"""Token ids to text, one token at a time: whole characters only, stop strings cut off.

Owns the bytes of each token and the text state of one answer. Knows no request and no HTTP. Work
per token is constant: nothing is decoded twice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class UnsupportedDecoder(ValueError):
    """A tokenizer.json whose decoder cannot be expressed as bytes of single tokens."""


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


class TokenBytes:
    """The bytes that each token id of a tokenizer spells.

    Built from tokenizer.json's `decoder`: ByteLevel, Metaspace, or a Sequence of Replace,
    ByteFallback, Fuse and Strip as SentencePiece conversions have it. Ids outside the vocabulary
    (a model's padding rows) spell nothing.

    Raises UnsupportedDecoder for any other decoder.
    """

    def __init__(
        self, vocab: Mapping[str, int], special_ids: Iterable[int], decoder: Mapping[str, Any]
    ) -> None:
        self.special_ids = frozenset(special_ids)
        self.strips_first_space = False
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = False
        self._byte_fallback = False
        self._read_decoder(decoder)
        alphabet = byte_level_alphabet()
        self._table: list[bytes] = [b""] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            self._table[token_id] = self._spell(token, alphabet)
        self.longest = max(map(len, self._table), default=0)

    def __len__(self) -> int:
        return len(self._table)

    def spell(self, token_id: int) -> bytes:
        """The token's bytes, special tokens as they are written."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def shown(self, token_id: int) -> bytes:
        """The token's bytes in an answer: special tokens are hidden."""
        return b"" if token_id in self.special_ids else self.spell(token_id)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once."""
        text = Utf8Stream(self, skip_special_tokens)
        return "".join([text.feed(token_id) for token_id in token_ids]) + text.flush()

    def _read_decoder(self, decoder: Mapping[str, Any]) -> None:
        kind = decoder.get("type")
        if kind == "Sequence":
            for part in decoder["decoders"]:
                self._read_decoder(part)
        elif kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in decoder["pattern"]:
            self._replacements.append((decoder["pattern"]["String"], decoder["content"]))
        elif kind == "Strip" and decoder["content"] == " " and decoder["stop"] == 0:
            self.strips_first_space = decoder["start"] > 0
        elif kind == "Metaspace":
            self._replacements.append((decoder["replacement"], " "))
            self.strips_first_space = decoder.get("prepend_scheme", "always") != "never"
        elif kind != "Fuse":
            raise UnsupportedDecoder(
                f"tokenizer.json has the decoder {decoder.get('type')!r}; accepted are ByteLevel, "
                "Metaspace, ByteFallback, Fuse, a Replace of plain strings, a Strip of leading "
                "spaces, and sequences of them"
            )

    def _spell(self, token: str, alphabet: Mapping[str, int]) -> bytes:
        if self._byte_level:
            # Added tokens may hold characters outside the alphabet; they are spelled as written.
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            return token.encode()
        if self._byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            return bytes((int(token[3:5], 16),))
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


class Utf8Stream:
    """Joins tokens' bytes into whole characters. What is held back is at most the first three bytes
    of one character; U+FFFD stands only for bytes that can no longer become one."""

    def __init__(
        self, table: TokenBytes, skip_special_tokens: bool = True, *, continues: bool = False
    ) -> None:
        """`continues`: other text stands before this one, so a first space is real."""
        self._bytes_of = table.shown if skip_special_tokens else table.spell
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = table.strips_first_space and not continues

    def feed(self, token_id: int) -> str:
        return self._started(self._decoder.decode(self._bytes_of(token_id)))

    def flush(self) -> str:
        return self._started(self._decoder.decode(b"", final=True))

    def _started(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StopMatcher:
    """Finds the first stop string to be completed, whatever the pieces the text comes in.

    One Knuth-Morris-Pratt automaton per string: constant work per character, and the state is the
    length of the prefix that may still become a match, which is what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fails = [_failure_table(stop) for stop in stops]
        self._states = [0] * len(stops)

    def feed(self, text: str, may_stop: bool = True) -> tuple[int, int] | None:
        """(characters of `text` read, length of the stop string they end with), or None. Without
        `may_stop` matches are passed over. Not to be called again after a match."""
        for place, char in enumerate(text):
            matched = 0
            for which, stop in enumerate(self._stops):
                fail, state = self._fails[which], self._states[which]
                while state and stop[state] != char:
                    state = fail[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    matched = max(matched, state)
                    state = fail[state - 1]
                self._states[which] = state
            if matched and may_stop:
                return place + 1, matched
        return None

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._states, default=0)


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper border."""
    fail = [0] * len(stop)
    border = 0
    for place in range(1, len(stop)):
        while border and stop[place] != stop[border]:
            border = fail[border - 1]
        border += stop[place] == stop[border]
        fail[place] = border
    return fail


class AnswerText:
    """The text of one answer: decoded, held back, and ended by a stop string.

    Tokens are numbered in the order of `feed`. `num_shown` is how many of them have reached the
    client: a token is shown with the first character that it helps to spell, so whatever is
    reported per token lines up with the text.
    """

    def __init__(
        self,
        table: TokenBytes,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,  # stop strings completed before this many tokens do not count
        skip_special_tokens: bool = True,
        continues: bool = False,  # as in Utf8Stream
    ) -> None:
        self._utf8 = Utf8Stream(table, skip_special_tokens, continues=continues)
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._held = ""
        self._num_read = 0  # characters decoded so far
        self._num_out = 0  # characters handed out so far
        self._token_starts: list[int] = []  # of the tokens that are not shown yet
        self._num_tokens = 0
        self.num_shown = 0
        self.stopped = False  # by a stop string

    def feed(self, token_id: int) -> str:
        """The characters that became certain with this token. Not to be called once stopped."""
        self._token_starts.append(self._num_read)
        self._num_tokens += 1
        return self._read(self._utf8.feed(token_id))

    def finish(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        if self.stopped:
            return ""
        out = self._read(self._utf8.flush())
        if not self.stopped:
            out += self._held
            self._num_out += len(self._held)
            self._held = ""
            self.num_shown += len(self._token_starts)
            self._token_starts.clear()
        return out

    def _read(self, text: str) -> str:
        self._num_read += len(text)
        if self._matcher is None:
            return self._hand_out(text)
        match = self._matcher.feed(text, self._num_tokens >= self._min_tokens)
        self._held += text
        if match is None:
            keep = self._matcher.num_held
        else:
            num_read, length = match
            self._held = self._held[: len(self._held) - len(text) + num_read - length]
            self.stopped = True
            keep = 0
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return self._hand_out(out)

    def _hand_out(self, text: str) -> str:
        self._num_out += len(text)
        starts = self._token_starts
        num_shown = 0
        while num_shown < len(starts) and starts[num_shown] < self._num_out:
            num_shown += 1
        if num_shown:
            del starts[:num_shown]
            self.num_shown += num_shown
        return text
