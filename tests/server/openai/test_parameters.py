"""Every parameter: what is accepted reaches the worker, what is wrong is a 400 that names it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.types import SamplingParams
from tests.server.scripted import MODEL_NAME, ScriptedWorker, Server, reply, serving

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
QUESTION = [{"role": "user", "content": "hi"}]
CONTEXT = 2048


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        tokenizer = running.tokenizer
        token_ids = [*tokenizer.encode("one two three four five"), *tokenizer.eos_token_ids]
        running.add_worker(reply(token_ids), context_length=CONTEXT)
        yield running


@pytest.fixture
def worker(server: Server) -> ScriptedWorker:
    [worker] = server.workers
    while not worker.submits.empty():
        worker.submits.get()
    return worker


def post(server: Server, route: str, **fields: Any) -> httpx.Response:
    prompt = {"messages": QUESTION} if route == CHAT else {"prompt": "hi"}
    body = {"model": MODEL_NAME, **prompt, **fields}
    return server.http.post(f"{route}", json=body, timeout=60)


def sampling(server: Server, worker: ScriptedWorker, route: str, **fields: Any) -> SamplingParams:
    assert post(server, route, **fields).status_code == 200
    return worker.submits.get(timeout=60).request.sampling


def test_defaults(server: Server, worker: ScriptedWorker) -> None:
    eos = server.tokenizer.eos_token_ids
    prompt = server.tokenizer.encode_chat(QUESTION)
    chat = sampling(server, worker, CHAT)
    assert chat.max_tokens == CONTEXT - len(prompt)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.min_p) == (1.0, 1.0, 0, 0.0)
    assert (chat.frequency_penalty, chat.presence_penalty) == (0.0, 0.0)
    assert chat.repetition_penalty == 1.0
    assert chat.stop_token_ids == eos
    assert chat.logprobs is None
    assert 0 <= chat.seed < 2**63
    assert chat.seed != sampling(server, worker, CHAT).seed
    assert sampling(server, worker, COMPLETION).max_tokens == 16


def test_given_values_reach_the_worker(server: Server, worker: ScriptedWorker) -> None:
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "frequency_penalty": -1.5,
        "presence_penalty": 1.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"3": -100, "5": 1.5},
        "seed": 42,
        "stop_token_ids": [8, 9],
    }
    for route in (CHAT, COMPLETION):
        found = sampling(server, worker, route, **fields)
        expected = {**fields, "logit_bias": {3: -100.0, 5: 1.5}}
        expected["stop_token_ids"] = (8, 9, *server.tokenizer.eos_token_ids)
        for name, value in expected.items():
            assert getattr(found, name) == value, name


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_p": 0}, "top_k", 1),
        ({"top_p": 0}, "top_p", 1.0),
        ({"seed": -1}, "seed", 2**63 - 1),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 20}, "logprobs", 20),
        ({"logprobs": False}, "logprobs", None),
        ({"ignore_eos": True, "max_tokens": 3}, "stop_token_ids", ()),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 2}, "temperature", 2.0),
    ],
)
def test_what_values_mean(
    server: Server, worker: ScriptedWorker, fields: dict[str, Any], name: str, value: object
) -> None:
    assert getattr(sampling(server, worker, CHAT, **fields), name) == value


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_the_newer_name_of_max_tokens_wins(
    server: Server, worker: ScriptedWorker, route: str
) -> None:
    fields = {"max_completion_tokens": 5, "max_tokens": 9}
    assert sampling(server, worker, route, **fields).max_tokens == 5


def test_the_models_own_defaults_stand_where_a_request_says_nothing(
    server: Server, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.5}
    monkeypatch.setattr(server.tokenizer, "sampling_defaults", defaults)
    found = sampling(server, worker, CHAT)
    assert {name: getattr(found, name) for name in defaults} == defaults
    found = sampling(server, worker, COMPLETION, temperature=1, top_p=1, top_k=0)
    assert (found.temperature, found.top_p, found.top_k) == (1.0, 1.0, 0)


def test_choices_have_different_seeds_and_the_first_is_the_clients(
    server: Server, worker: ScriptedWorker
) -> None:
    assert post(server, CHAT, n=4, seed=5, max_tokens=1).status_code == 200
    seeds = {}
    for _ in range(4):
        request = worker.submits.get(timeout=60).request
        seeds[int(request.rid.rsplit("-", 1)[1])] = request.sampling.seed
    assert seeds[0] == 5
    assert len(set(seeds.values())) == 4


def test_priority_reaches_the_worker(server: Server, worker: ScriptedWorker) -> None:
    assert post(server, CHAT, priority=3, max_tokens=1).status_code == 200
    assert worker.submits.get(timeout=60).request.priority == 3


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_the_time_to_keep_the_prefix_reaches_the_worker(
    server: Server, worker: ScriptedWorker, route: str
) -> None:
    for pin_prefix_s in (None, 0, 3600):
        assert post(server, route, pin_prefix_s=pin_prefix_s, max_tokens=1).status_code == 200
        assert worker.submits.get(timeout=60).request.pin_s == (pin_prefix_s or 0)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
                }
            ]
        },
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": 3}, "logprobs"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    (CHAT, {"add_generation_prompt": "no"}, "add_generation_prompt"),
    (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (COMPLETION, {"prompt": None}, "prompt"),
    (COMPLETION, {"prompt": ""}, "prompt"),
    (COMPLETION, {"prompt": []}, "prompt"),
    (COMPLETION, {"prompt": [[]]}, "prompt"),
    (COMPLETION, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETION, {"prompt": [-1]}, "prompt"),
    (COMPLETION, {"prompt": [10**6]}, "prompt"),
    (COMPLETION, {"prompt": [True]}, "prompt"),
    (COMPLETION, {"prompt": ["x"] * 100, "n": 16}, "prompt"),
    (COMPLETION, {"logprobs": 21}, "logprobs"),
    (COMPLETION, {"logprobs": -1}, "logprobs"),
    (COMPLETION, {"best_of": 3}, "best_of"),
    (COMPLETION, {"echo": "yes"}, "echo"),
    (COMPLETION, {"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
]
WRONG += [
    (route, fields, next(iter(fields)))
    for route in (CHAT, COMPLETION)
    for fields in (
        {"n": 0},
        {"n": 17},
        {"n": 1_000_000},
        {"n": "2"},
        {"n": True},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"seed": 2**63},
        {"seed": 1.5},
        {"max_tokens": -1},
        {"max_tokens": "5"},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": "hot"},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"top_k": -2},
        {"min_p": 1.5},
        {"frequency_penalty": 2.5},
        {"presence_penalty": -2.5},
        {"repetition_penalty": 0},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1000000": 1}},
        {"logit_bias": {str(place): 1 for place in range(301)}},
        {"stop_token_ids": [10**6]},
        {"stop_token_ids": [1] * 300},
        {"min_tokens": 9, "max_tokens": 8},
        {"ignore_eos": 1},
        {"priority": 2**40},
        {"pin_prefix_s": 3601},
        {"pin_prefix_s": -1},
        {"pin_prefix_s": 1.5},
        {"pin_prefix_s": True},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},
        {"user": 5},
        {"model": 5},
        {"model": None},
    )
]


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    WRONG,
    ids=[f"{route[4:8]}-{str(fields)[:40]}" for route, fields, _ in WRONG],
)
def test_wrong_values_are_refused_by_name(
    server: Server, worker: ScriptedWorker, route: str, fields: dict[str, Any], param: str
) -> None:
    response = post(server, route, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert worker.submits.empty()


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_the_context_is_checked_with_both_numbers(
    server: Server, worker: ScriptedWorker, route: str
) -> None:
    response = post(server, route, max_tokens=CONTEXT)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    long = "hi " * CONTEXT
    fields = (
        {"messages": [{"role": "user", "content": long}]} if route == CHAT else {"prompt": long}
    )
    error = post(server, route, **fields).json()["error"]
    assert error["code"] == "context_length_exceeded"
    numbers = [int(word) for word in error["message"].split() if word.isdigit()]
    assert CONTEXT in numbers
    assert any(number > CONTEXT for number in numbers)
    assert worker.submits.empty()


def test_the_whole_context_may_be_used(server: Server, worker: ScriptedWorker) -> None:
    fields = {"prompt": [1] * (CONTEXT - 2), "max_tokens": 2}
    assert post(server, COMPLETION, **fields).status_code == 200
    fields = {"prompt": [1] * (CONTEXT - 2)}  # the default is cut to the room there is
    assert sampling(server, worker, COMPLETION, **fields).max_tokens == 2
    assert post(server, COMPLETION, prompt=[1] * CONTEXT).status_code == 400


def test_what_cannot_fit_is_refused_before_it_is_tokenized(server: Server) -> None:
    error = post(server, COMPLETION, prompt="x" * 4_000_000).json()["error"]
    assert error["code"] == "context_length_exceeded"


COMBINED: dict[str, list[Any]] = {
    "stream": [False, True],
    "n": [1, 2],
    "stop": [None, "three", ["two", "x"]],
    "logprobs": [False, True],
    "temperature": [0, 1.5],
    "top_p": [1, 0.5],
    "top_k": [0, 5],
    "frequency_penalty": [0, 1],
    "presence_penalty": [0, -1],
    "repetition_penalty": [1, 1.2],
    "logit_bias": [None, {"5": -100}],
    "seed": [None, 1],
    "min_tokens": [0, 2],
    "max_tokens": [None, 2],
    "ignore_eos": [False, True],
    "echo": [False, True],
}


def pairwise() -> Iterator[dict[str, Any]]:
    """Rows that hold every pair of values of every two parameters, greedily few."""
    names = list(COMBINED)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(COMBINED[names[a]]))
        for y in range(len(COMBINED[names[b]]))
    }
    while missing:
        row: dict[int, int] = dict(min(missing))
        for place in range(len(names)):
            if place not in row:
                row[place] = max(
                    range(len(COMBINED[names[place]])),
                    key=lambda value: sum(
                        tuple(sorted([(place, value), other])) in missing for other in row.items()
                    ),
                )
        missing -= set(itertools.combinations(sorted(row.items()), 2))
        yield {names[place]: COMBINED[names[place]][value] for place, value in row.items()}


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
@pytest.mark.parametrize("fields", list(pairwise()), ids=str)
def test_every_pair_of_parameters_works(server: Server, route: str, fields: dict[str, Any]) -> None:
    is_whole = fields["stop"] is None and fields["max_tokens"] is None
    fields = dict(fields)
    if route == CHAT:
        del fields["echo"]
        if fields["logprobs"]:
            fields["top_logprobs"] = 2
    else:
        fields["logprobs"] = 2 if fields["logprobs"] else None
    if fields["ignore_eos"] and fields["max_tokens"] is None:
        fields["max_tokens"] = 30
    response = post(server, route, **fields)
    assert response.status_code == 200, response.text
    if fields["stream"]:
        lines = response.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        choices = [json.loads(line[6:])["choices"][0] for line in lines[:-2]]
    else:
        choices = response.json()["choices"]
    reasons = [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]]
    assert sorted(index for index, _ in reasons) == list(range(fields["n"]))
    text = ""
    for choice in choices:
        if choice["index"] == 0:
            message = choice.get("message") or choice.get("delta") or {}
            text += choice.get("text") or message.get("content") or ""
    assert ("three" in text) == is_whole
    assert any(choice["logprobs"] for choice in choices) == bool(fields["logprobs"])


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_a_whole_number_may_be_written_with_a_point(
    server: Server, worker: ScriptedWorker, route: str
) -> None:
    prompt = '"messages":[{"role":"user","content":"hi"}]' if route == CHAT else '"prompt":"hi"'
    numbers = '"max_tokens":4.0,"top_k":1e1,"seed":7.0,"temperature":1,"stop_token_ids":[3.0]'
    text = f'{{"model":"{MODEL_NAME}",{prompt},{numbers}}}'
    headers = {"Content-Type": "application/json"}
    assert server.http.post(route, content=text, headers=headers).status_code == 200
    params = worker.submits.get(timeout=60).request.sampling
    assert (params.max_tokens, params.top_k, params.seed, params.temperature) == (4, 10, 7, 1.0)
    assert 3 in params.stop_token_ids
    for wrong in ("4.5", "1e300", "NaN"):
        refused = server.http.post(route, content=text.replace("4.0", wrong), headers=headers)
        assert refused.status_code == 400
