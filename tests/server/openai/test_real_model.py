"""Parameters, stop strings and errors against the real server: what a worker does with them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.served import Served
from tests.server.openai.test_parameters import WRONG, pairwise

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ROUTES = (CHAT, COMPLETIONS)
MODES = [
    pytest.param(route, stream, id=f"{route[4:8]}-{'stream' if stream else 'body'}")
    for route in ROUTES
    for stream in (False, True)
]
LONG_TEXT = "hi " * 3000


@pytest.fixture(scope="module")
def http(served: Served) -> Any:
    with httpx.Client(base_url=served.url, timeout=120, trust_env=False) as client:
        yield client


def post(http: httpx.Client, route: str, **fields: Any) -> httpx.Response:
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if route == CHAT else {"prompt": "hi"}
    )
    return http.post(route, json={"model": "tiny", **prompt, **fields})


def choices_of(response: httpx.Response) -> list[dict[str, Any]]:
    """A body's choices, or the parts of them that a stream's chunks bring."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return list(response.json()["choices"])
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line[6:])["choices"][0] for line in lines[:-2]]


def text_of(choices: list[dict[str, Any]]) -> str:
    shown = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    return "".join(part.get("content") or part.get("text") or "" for part in shown)


@pytest.mark.parametrize(("route", "stream"), MODES)
def test_a_stop_string_cuts_the_answer_exactly(
    http: httpx.Client, route: str, stream: bool
) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, "temperature": 0, "stream": stream}
    whole = text_of(choices_of(post(http, route, **fields)))
    assert len(whole) > 20
    for first, length in ((1, 1), (4, 7), (len(whole) - 3, 3)):
        stop = whole[first : first + length]
        choices = choices_of(post(http, route, **fields, stop=["never said", stop]))
        assert text_of(choices) == whole[: whole.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("route", ROUTES)
def test_every_pair_of_parameters_works(http: httpx.Client, route: str) -> None:
    for row in pairwise():
        fields = {**row, "max_tokens": row["max_tokens"] or 5}
        if route == CHAT:
            del fields["echo"]
        else:
            fields["logprobs"] = 2 if fields["logprobs"] else None
        choices = choices_of(post(http, route, **fields))
        reasons = [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]]
        assert sorted(index for index, _ in reasons) == list(range(fields["n"])), fields
        assert any(choice["logprobs"] for choice in choices) == bool(fields["logprobs"]), fields


def test_a_bias_decides_the_token(http: httpx.Client) -> None:
    for stream in (False, True):
        [banned] = http.post("/tokenize", json={"prompt": " Paris"}).json()["tokens"]
        fields = {"max_tokens": 3, "stream": stream, "ignore_eos": True, "temperature": 0}
        choices = choices_of(post(http, COMPLETIONS, **fields, logit_bias={str(banned): 100}))
        assert text_of(choices) == " Paris" * 3


def test_wrong_values_are_refused_by_name(http: httpx.Client) -> None:
    for route, fields, param in WRONG:
        response = post(http, route, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), fields


@pytest.mark.parametrize("route", ROUTES)
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    http: httpx.Client, route: str
) -> None:
    context = http.post("/tokenize", json={"prompt": "hi"}).json()["max_model_len"]
    fields: dict[str, Any] = {"prompt": LONG_TEXT}
    if route == CHAT:
        fields = {"messages": [{"role": "user", "content": LONG_TEXT}]}
    response = post(http, route, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    numbers = [int(word) for word in error["message"].split() if word.isdigit()]
    assert context in numbers
    assert max(numbers) > context


def test_the_whole_context_may_be_used(http: httpx.Client) -> None:
    context = http.post("/tokenize", json={"prompt": "hi"}).json()["max_model_len"]
    fields = {"prompt": [100] * (context - 2), "ignore_eos": True, "max_tokens": 2}
    [choice] = choices_of(post(http, COMPLETIONS, **fields))
    assert choice["finish_reason"] == "length"
    assert post(http, COMPLETIONS, **{**fields, "max_tokens": 3}).status_code == 400
