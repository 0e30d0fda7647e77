"""Joined deltas equal the whole text, stop strings are cut exactly, tokens and text line up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from server.detokenizer import AnswerText, StopMatcher, TokenBytes, UnsupportedDecoder
from server.tokenizer import Tokenizer
from tests.server.scripted import tiny_tokenizer

BACKEND = tiny_tokenizer()
TINY = Tokenizer(BACKEND)
TABLE = TINY.token_bytes
IDS = st.lists(st.integers(0, TINY.vocab_size - 1), max_size=40)


def fed(text: AnswerText, token_ids: list[int]) -> list[str]:
    pieces = []
    for token_id in token_ids:
        if text.stopped:
            break
        pieces.append(text.feed(token_id))
    return pieces if text.stopped else [*pieces, text.finish()]


@given(IDS)
def test_deltas_join_to_the_decoded_whole(token_ids: list[int]) -> None:
    assert "".join(fed(AnswerText(TABLE), token_ids)) == BACKEND.decode(token_ids)


@given(IDS)
def test_special_tokens_show_where_asked(token_ids: list[int]) -> None:
    text = AnswerText(TABLE, skip_special_tokens=False)
    whole = BACKEND.decode(token_ids, skip_special_tokens=False)
    assert "".join(fed(text, token_ids)) == whole


@given(st.text(max_size=60))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    token_ids = TINY.encode(text, parse_special=False)
    for piece in fed(AnswerText(TABLE), token_ids):
        assert piece.count("\ufffd") <= text.count("\ufffd")


def test_a_character_comes_whole_with_its_last_byte() -> None:
    token_ids = TINY.encode("日", parse_special=False)
    assert len(token_ids) == 3
    text = AnswerText(TABLE)
    assert [text.feed(token_id) for token_id in token_ids] == ["", "", "日"]
    assert text.num_shown == 3


def test_invalid_bytes_are_shown_once_they_are_certain() -> None:
    first_byte = TINY.encode("日", parse_special=False)[0]
    [letter] = TINY.encode("x", parse_special=False)
    text = AnswerText(TABLE)
    assert [text.feed(first_byte), text.feed(letter)] == ["", "\ufffdx"]
    text = AnswerText(TABLE)
    assert [text.feed(first_byte), text.finish()] == ["", "\ufffd"]


def first_end(text: str, stops: list[str]) -> str | None:
    """What stands before the stop string that is completed first; the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


@given(
    st.lists(st.text("ab", max_size=6), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=300)
def test_stop_strings_match_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        match = matcher.feed(piece)
        if match is not None:
            num_read, length = match
            text += piece[:num_read]
            assert first_end(text, stops) == text[: len(text) - length]
            return
        text += piece
        held = matcher.num_held
        could_begin = [
            size
            for size in range(len(text) + 1)
            if any(stop.startswith(text[len(text) - size :]) and size < len(stop) for stop in stops)
        ]
        assert held == max(could_begin)
    assert first_end(text, stops) is None


@given(IDS, st.lists(st.text("abt e日", min_size=1, max_size=4), min_size=1, max_size=4))
def test_nothing_of_a_stop_string_leaks(token_ids: list[int], stops: list[str]) -> None:
    whole = BACKEND.decode(token_ids)
    expected = first_end(whole, stops)
    shown = ""
    text = AnswerText(TABLE, stops)
    for piece in fed(text, token_ids):
        shown += piece
        assert (expected if expected is not None else whole).startswith(shown)
    assert shown == (whole if expected is None else expected)
    assert text.stopped == (expected is not None)


@given(IDS, st.lists(st.text("abt e日", min_size=1, max_size=4), max_size=2))
def test_tokens_are_shown_with_their_first_character(
    token_ids: list[int], stops: list[str]
) -> None:
    text = AnswerText(TABLE, stops)
    shown = ""
    for token_id in token_ids:
        if text.stopped:
            break
        shown += text.feed(token_id)
        spelled = b"".join(map(TABLE.shown, token_ids[: text.num_shown]))
        assert len(shown) <= len(spelled.decode("utf-8", "replace"))
    if not text.stopped:
        text.finish()
        assert text.num_shown == len(token_ids)


def test_stop_strings_wait_for_min_tokens() -> None:
    token_ids = TINY.encode("xx xx", parse_special=False)
    start = len(TINY.encode("xx ", parse_special=False))
    text = AnswerText(TABLE, ["xx"], min_tokens=start + 1)
    assert "".join(fed(text, token_ids)) == "xx "
    assert text.stopped


def test_ids_outside_the_vocabulary_say_nothing() -> None:
    assert TABLE.decode([-1, 10**6]) == ""


SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def test_sentencepiece_vocabularies_decode_as_the_library_does() -> None:
    words = ["<s>", "▁Hello", "▁world", "l", "▁", "<0xE6>", "<0x97>", "<0xA5>", "日", "<0x0A>"]
    vocab = {word: place for place, word in enumerate(words)}
    table = TokenBytes(vocab, [0], SENTENCEPIECE)
    library = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    for token_ids in ([1, 2, 3], [4, 4, 1], [5, 6, 7, 2], [8, 9, 9, 1], [2], []):
        assert table.decode(token_ids) == library.decode([words[i] for i in token_ids])
    assert AnswerText(table, continues=True).feed(2) == " world"
    assert AnswerText(table).feed(2) == "world"


def test_metaspace_vocabularies_decode_as_the_library_does() -> None:
    words = ["▁Hello", "▁world", "s"]
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    table = TokenBytes({word: place for place, word in enumerate(words)}, [], decoder)
    for token_ids in ([0, 1, 2], [2, 1], [1]):
        expected = decoders.Metaspace().decode([words[i] for i in token_ids])
        assert table.decode(token_ids) == expected


def test_an_unknown_decoder_is_named() -> None:
    with pytest.raises(UnsupportedDecoder, match=r"WordPiece.*ByteLevel"):
        TokenBytes({}, [], {"type": "WordPiece"})
