"""Outputs are folded in order and once each, however they arrive."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.types import TokenLogprob, TokenOut
from server.answer import Answer, Delta
from server.detokenizer import AnswerText
from tests.server.scripted import make_tokenizer

TOKENIZER = make_tokenizer()
TEXT = "one two three 日本 four"
IDS = TOKENIZER.encode(TEXT)


def answer(stops: tuple[str, ...] = ()) -> Answer:
    return Answer(0, AnswerText(TOKENIZER.token_bytes, stops))


def fold_all(one: Answer, outs: list[TokenOut]) -> list[Delta]:
    return [delta for out in outs if (delta := one.fold(out)) is not None]


@given(
    st.permutations(range(len(IDS))),
    st.lists(st.tuples(st.integers(0, len(IDS) - 1), st.integers(1, 6)), max_size=6),
)
def test_order_and_repetition_do_not_matter(
    order: list[int], repeated: list[tuple[int, int]]
) -> None:
    outs = [out(place, place + 1) for place in order]
    outs[3:3] = [out(start, min(start + size, len(IDS))) for start, size in repeated]
    deltas = fold_all(answer(), outs)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert sum(delta.num_tokens for delta in deltas) == len(IDS)
    assert [delta.finish_reason for delta in deltas if delta.is_last] == ["length"]
    logprobs = [item.token_id for delta in deltas for item in delta.logprobs]
    assert logprobs == IDS


def out(start: int, end: int) -> TokenOut:
    return TokenOut(
        rid="r",
        index=start,
        ids=IDS[start:end],
        logprobs=[TokenLogprob(token_id, -1.0) for token_id in IDS[start:end]],
        finish_reason="length" if end == len(IDS) else None,
    )


def test_nothing_follows_the_end() -> None:
    one = answer()
    assert one.fold(out(0, len(IDS))) is not None
    assert one.fold(out(0, len(IDS))) is None
    assert one.fold(TokenOut(rid="r", index=len(IDS), finish_reason="error", error="x")) is None


def test_the_end_of_an_attempt_that_is_over_is_not_the_answers() -> None:
    one = answer()
    assert one.fold(TokenOut(rid="r", index=2, finish_reason="error", error="x")) is None
    one.attempt = 1
    again = [msgspec.structs.replace(out(place, place + 1), attempt=1) for place in range(len(IDS))]
    deltas = fold_all(one, again)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [delta.finish_reason for delta in deltas if delta.is_last] == ["length"]


def test_a_stop_token_is_counted_not_shown() -> None:
    one = answer()
    end = TokenOut(
        rid="r",
        index=0,
        ids=IDS[:2],
        logprobs=[TokenLogprob(token_id, -1.0) for token_id in IDS[:2]],
        finish_reason="stop",
        stop_token=True,
    )
    delta = one.fold(end)
    assert delta is not None
    assert delta.text == TOKENIZER.decode(IDS[:1])
    assert delta.num_tokens == 2
    assert [item.token_id for item in delta.logprobs] == IDS[:1]


def test_a_stop_string_ends_early_only_where_the_worker_goes_on() -> None:
    for end, early in ((out(0, len(IDS) - 2), True), (out(0, len(IDS)), True)):
        one = answer(("two",))
        delta = one.fold(end)
        assert delta is not None
        assert (delta.text, delta.finish_reason) == ("one ", "stop")
        assert one.ended_early == early
        assert delta.num_tokens < len(end.ids)
    one = answer(("four",))
    delta = one.fold(out(0, len(IDS)))
    assert delta is not None
    assert delta.finish_reason == "stop"
    assert not one.ended_early


def test_cached_tokens_and_prompt_logprobs_come_once() -> None:
    one = answer()
    prompt = [None, TokenLogprob(1, -1.0)]
    first = one.fold(
        TokenOut(
            rid="r",
            index=0,
            ids=IDS[:1],
            cached_tokens=64,
            cached_host_tokens=16,
            prompt_logprobs=prompt,
        )
    )
    # Of the decode worker, which found another part of the prompt in its own cache.
    second = one.fold(
        TokenOut(rid="r", index=1, ids=IDS[1:2], cached_tokens=48, cached_host_tokens=48)
    )
    assert first is not None
    assert second is not None
    assert (first.cached_tokens, first.cached_host_tokens) == (64, 16)
    assert first.prompt_logprobs == prompt
    assert (second.cached_tokens, second.cached_host_tokens) == (0, 0)
    assert second.prompt_logprobs == []
