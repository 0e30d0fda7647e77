"""Text at its borders: characters and stop strings over tokens and chunks, on both routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.messages import Submit
from engine.types import TokenOut
from server.tokenizer import Tokenizer
from tests.server.scripted import MODEL_NAME, Script, Server, make_tokenizer, reply, serving

TOKENIZER = make_tokenizer()
TEXT = "One naïve 日本 👩‍🚀 STOP here. The end"
EOS = TOKENIZER.eos_token_ids[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        running.add_worker(saying(TOKENIZER, TEXT))
        yield running


def saying(tokenizer: Tokenizer, text: str, step: int = 1) -> Script:
    return reply([*tokenizer.encode(text, parse_special=False), EOS], step=step)


class Answer:
    """Either mode's answer of one choice: text, its pieces, reason, usage."""

    def __init__(self, server: Server, route: str, stream: bool, body: dict[str, Any]) -> None:
        prompt = {"prompt": "x"}
        if route == "chat/completions":
            prompt = {"messages": [{"role": "user", "content": "x"}]}  # type: ignore[dict-item]
        asked: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 200, **prompt, **body}
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        response = server.http.post(f"/v1/{route}", json=asked, timeout=60)
        assert response.status_code == 200, response.text
        if stream:
            lines = response.text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(line[6:]) for line in lines[:-2]]
            self.usage = chunks[-1]["usage"]
            choices = [chunk["choices"][0] for chunk in chunks[:-1]]
            key = "delta" if "chat" in route else None
            self.pieces = [
                (choice[key].get("content") or "") if key else choice["text"] for choice in choices
            ]
            reasons = [choice["finish_reason"] for choice in choices]
            assert reasons[:-1] == [None] * (len(reasons) - 1)
            assert self.pieces[-1] == ""
            self.reason = reasons[-1]
        else:
            [choice] = response.json()["choices"]
            self.usage = response.json()["usage"]
            self.pieces = [choice["message"]["content"] if "chat" in route else choice["text"]]
            self.reason = choice["finish_reason"]
        self.text = "".join(self.pieces)


BOTH = [
    pytest.param(route, stream, id=f"{route}-{'stream' if stream else 'body'}")
    for route in ("chat/completions", "completions")
    for stream in (False, True)
]


@pytest.mark.parametrize(("route", "stream"), BOTH)
def test_characters_come_whole_and_eos_is_hidden(server: Server, route: str, stream: bool) -> None:
    answer = Answer(server, route, stream, {})
    assert answer.text == TEXT
    assert answer.reason == "stop"
    num_tokens = len(TOKENIZER.encode(TEXT, parse_special=False)) + 1
    assert answer.usage["completion_tokens"] == num_tokens
    assert all("\ufffd" not in piece for piece in answer.pieces)


@pytest.mark.parametrize(("route", "stream"), BOTH)
def test_cached_tokens_are_told_by_tier(server: Server, route: str, stream: bool) -> None:
    """The scripted worker found half of the prompt, half of that in its host tier."""
    usage = Answer(server, route, stream, {"prompt": "one two three four five six"}).usage
    num_prompt, details = usage["prompt_tokens"], usage["prompt_tokens_details"]
    assert num_prompt >= 4
    by_tier = {"device": num_prompt // 2 - num_prompt // 4, "host": num_prompt // 4}
    assert details == {"cached_tokens": num_prompt // 2, "cached_tokens_by_tier": by_tier}


@pytest.mark.parametrize(("route", "stream"), BOTH)
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("STOP", "One naïve 日本 👩‍🚀 "),
        (" 👩‍🚀 STOP", "One naïve 日本"),
        (["zzz", "本"], "One naïve 日"),
        (["STOP here", "STOP"], "One naïve 日本 👩‍🚀 "),
        (["One"], ""),
        (["The end!", "nothing"], TEXT),
        ("The end", TEXT.removesuffix("The end")),
    ],
)
def test_stop_strings_are_cut_exactly(
    server: Server, route: str, stream: bool, stop: object, shown: str
) -> None:
    answer = Answer(server, route, stream, {"stop": stop})
    assert answer.text == shown
    assert answer.reason == "stop"
    for place in range(len(answer.pieces)):
        assert shown.startswith("".join(answer.pieces[:place]))


@pytest.mark.parametrize(("route", "stream"), BOTH)
def test_a_stop_string_ends_the_workers_work(server: Server, route: str, stream: bool) -> None:
    [worker] = server.workers
    while not worker.aborts.empty():
        worker.aborts.get()
    Answer(server, route, stream, {"stop": "naïve", "ignore_eos": True, "max_tokens": 1500})
    assert worker.aborts.get(timeout=60)
    server.until(lambda: all(each.load.num_running == 0 for each in server.client.fleet))


@pytest.mark.parametrize(("route", "stream"), BOTH)
def test_length_is_the_reason_at_the_limit(server: Server, route: str, stream: bool) -> None:
    answer = Answer(server, route, stream, {"max_tokens": 2})
    assert answer.reason == "length"
    assert answer.usage["completion_tokens"] == 2
    assert TEXT.startswith(answer.text)


@pytest.mark.parametrize(("route", "stream"), BOTH)
def test_what_looks_like_a_stop_string_is_shown_at_the_end(
    server: Server, route: str, stream: bool
) -> None:
    answer = Answer(server, route, stream, {"stop": ["end of it"]})
    assert answer.text == TEXT
    assert answer.reason == "stop"


@pytest.mark.parametrize(("route", "stream"), BOTH)
def test_ignore_eos_goes_on(server: Server, route: str, stream: bool) -> None:
    num_tokens = len(TOKENIZER.encode(TEXT, parse_special=False)) + 3
    answer = Answer(server, route, stream, {"ignore_eos": True, "max_tokens": num_tokens})
    assert answer.reason == "length"
    assert answer.text.startswith(TEXT)
    assert "<|im_end|>" not in answer.text
    shown = Answer(
        server,
        route,
        stream,
        {"ignore_eos": True, "max_tokens": num_tokens, "skip_special_tokens": False},
    )
    assert "<|im_end|>" in shown.text


@pytest.mark.parametrize(("route", "stream"), BOTH)
def test_stop_token_ids_end_and_are_hidden(server: Server, route: str, stream: bool) -> None:
    token_ids = TOKENIZER.encode(TEXT, parse_special=False)
    answer = Answer(server, route, stream, {"stop_token_ids": [token_ids[3]]})
    assert answer.text == TOKENIZER.decode(token_ids[:3])
    assert answer.reason == "stop"
    assert answer.usage["completion_tokens"] == 4


@pytest.mark.parametrize("step", [2, 5, 100])
@pytest.mark.parametrize("stop", [None, "STOP"])
def test_many_tokens_a_step_say_the_same(step: int, stop: str | None) -> None:
    with serving() as server:
        server.add_worker(saying(TOKENIZER, TEXT, step))
        answer = Answer(server, "chat/completions", True, {"stop": stop})
    assert answer.text == (TEXT if stop is None else TEXT[: TEXT.index(stop)])
    before_stop = TEXT[: TEXT.index("STOP") + len("STOP")]
    shown = TEXT if stop is None else before_stop
    assert len(TOKENIZER.encode(shown, parse_special=False)) <= answer.usage["completion_tokens"]


def test_logprobs_end_where_the_text_is_cut(server: Server) -> None:
    answer = server.http.post(
        "/v1/chat/completions",
        json={
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "x"}],
            "stop": "STOP",
            "logprobs": True,
            "top_logprobs": 0,
        },
    ).json()
    [choice] = answer["choices"]
    tokens = [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]]
    spelled = b"".join(tokens).decode("utf-8", "replace")
    assert spelled.startswith(choice["message"]["content"])
    without_last = b"".join(tokens[:-1]).decode("utf-8", "replace")
    assert len(without_last) < len(choice["message"]["content"])


def test_invalid_bytes_of_the_model_are_shown() -> None:
    broken = TOKENIZER.encode("日", parse_special=False)[:1]
    with serving() as server:
        server.add_worker(reply([*broken, *TOKENIZER.encode("ok"), EOS]))
        assert Answer(server, "completions", True, {}).text == "\ufffdok"


def test_choices_come_in_order_even_if_the_first_is_slow() -> None:
    def script(submit: Submit) -> Iterator[TokenOut | None]:
        is_first = submit.request.rid.endswith("-0")
        for out in saying(TOKENIZER, "yes")(submit):
            for _ in range(5 if is_first else 0):
                yield None
            yield out

    with serving() as server:
        server.add_worker(script)
        for route, prompt in (
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("completions", {"prompt": "x"}),
        ):
            body = {"model": MODEL_NAME, "n": 3, "stream": True, **prompt}
            text = server.http.post(f"/v1/{route}", json=body).text
            chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
            order = [chunk["choices"][0]["index"] for chunk in chunks]
            assert list(dict.fromkeys(order)) == [0, 1, 2]
            ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
            assert sorted(ends) == [0, 1, 2]
