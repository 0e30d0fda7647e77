"""What OpenAI clients rely on, through the real client and raw HTTP. Nothing here depends on what
the model says, so the same tests hold for any server (PLAIT_TEST_BASE_URL)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.openai.refusals import NEUTRAL
from server.openai.schema import ChatCompletionRequest, CompletionRequest

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def events(response: httpx.Response) -> list[Any]:
    """The values of a stream's data lines; [DONE] must be the last and only one of its kind."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_chat_answers_in_the_reference_shape(sdk: openai.OpenAI, model: str) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, max_tokens=8
    )
    answer = ChatCompletion.model_validate(json.loads(raw.text), strict=True)
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == model
    [choice] = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8
    total = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.total_tokens == total


def test_every_chat_chunk_is_whole(http: httpx.Client, model: str) -> None:
    body = {"model": model, "messages": QUESTION, "max_tokens": 6, "stream": True, "seed": 3}
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    chunks = events(response)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["id"] == chunks[0]["id"]
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["created"] == chunks[0]["created"]
        assert chunk["model"] == model
        assert "usage" not in chunk
        assert "finish_reason" in chunk["choices"][0]
        assert "logprobs" in chunk["choices"][0]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] in ("stop", "length")
    assert chunks[-1]["choices"][0]["delta"] == {}


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_joins_to_the_body(http: httpx.Client, model: str, n: int) -> None:
    body = {
        "model": model,
        "messages": QUESTION,
        "max_tokens": 24,
        "seed": 7,
        "n": n,
        "temperature": 0,
    }
    whole = http.post("/v1/chat/completions", json=body).json()
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}))
    texts, reasons, order = [""] * n, [[] for _ in range(n)], []
    for chunk in chunks:
        [choice] = chunk["choices"]
        order.append(choice["index"])
        texts[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"] is not None:
            reasons[choice["index"]].append(choice["finish_reason"])
    assert list(dict.fromkeys(order)) == list(range(n))
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [[choice["finish_reason"]] for choice in whole["choices"]]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_usage_comes_on_request_and_equals_the_bodys(
    http: httpx.Client, model: str, route: str
) -> None:
    body: dict[str, Any] = {"model": model, "max_tokens": 5, "temperature": 0}
    body |= {"messages": QUESTION} if "chat" in route else {"prompt": "The capital of France"}
    http.post(f"/v1/{route}", json=body)  # so that both runs find the same prefix cached
    whole = http.post(f"/v1/{route}", json=body).json()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(http.post(f"/v1/{route}", json=asked))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    CompletionUsage.model_validate(chunks[-1]["usage"], strict=True)
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    unasked = events(http.post(f"/v1/{route}", json={**body, "stream": True}))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in unasked)


def test_the_clients_stream_helper_sees_text_and_usage(sdk: openai.OpenAI, model: str) -> None:
    text, usage = "", None
    for chunk in sdk.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text
    assert usage is not None


def test_completions_answer_in_the_reference_shape(sdk: openai.OpenAI, model: str) -> None:
    answer = sdk.completions.create(model=model, prompt="Hello")
    assert answer.object == "text_completion"
    [choice] = answer.choices
    assert choice.index == 0
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16  # the reference's default


def test_completion_chunks_are_whole(http: httpx.Client, model: str) -> None:
    body = {"model": model, "prompt": "Hello", "max_tokens": 4, "stream": True}
    chunks = events(http.post("/v1/completions", json=body))
    for chunk in chunks:
        assert chunk["id"] == chunks[0]["id"]
        assert chunk["object"] == "text_completion"
        assert set(chunk["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert all(reason is None for reason in reasons[:-1])
    assert reasons[-1] in ("stop", "length")
    assert chunks[-1]["choices"][0]["text"] == ""


def test_prompts_in_all_four_forms(http: httpx.Client, model: str) -> None:
    ids = http.post("/tokenize", json={"model": model, "prompt": "Hello"}).json()["tokens"]
    common = {"model": model, "max_tokens": 6, "temperature": 0}
    texts = []
    for prompt in ("Hello", ["Hello", "Hello"], ids, [ids, ids]):
        answer = http.post("/v1/completions", json={**common, "prompt": prompt}).json()
        num = 2 if prompt in (["Hello", "Hello"], [ids, ids]) else 1
        assert [choice["index"] for choice in answer["choices"]] == list(range(num))
        assert answer["usage"]["prompt_tokens"] == num * len(ids)
        texts += [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_line_up_with_the_text(http: httpx.Client, model: str, stream: bool) -> None:
    body = {
        "model": model,
        "messages": QUESTION,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": stream,
    }
    response = http.post("/v1/chat/completions", json=body)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        found = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
        entries = [entry for content in found for entry in content]
    else:
        [choice] = response.json()["choices"]
        text, entries = choice["message"]["content"], choice["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled.decode("utf-8", "replace") == text
    for entry in entries:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs_line_up_with_the_text(
    http: httpx.Client, model: str, stream: bool, echo: bool
) -> None:
    body = {
        "model": model,
        "prompt": "Hello world",
        "max_tokens": 5,
        "logprobs": 1,
        "echo": echo,
        "stream": stream,
        "temperature": 0,
    }
    response = http.post("/v1/completions", json=body)
    answers = events(response) if stream else [response.json()]
    choices = [answer["choices"][0] for answer in answers]
    text = "".join(choice["text"] for choice in choices)
    lists: dict[str, list[Any]] = {}
    for choice in choices:
        for key, values in (choice["logprobs"] or {}).items():
            lists.setdefault(key, []).extend(values)
    assert set(lists) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in lists.values()}) == 1
    assert text.startswith("Hello world") == echo
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)
    first = 1 if echo else 0
    if echo:
        assert lists["token_logprobs"][0] is None
        assert lists["top_logprobs"][0] is None
    assert all(value <= 0 for value in lists["token_logprobs"][first:])
    for token, top in zip(lists["tokens"][first:], lists["top_logprobs"][first:], strict=True):
        assert token in top


def test_echo_without_tokens_only_evaluates_the_prompt(http: httpx.Client, model: str) -> None:
    body = {"model": model, "prompt": "Hello world", "max_tokens": 0, "echo": True, "logprobs": 0}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == "Hello world"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) > 1


def test_the_same_seed_says_the_same(http: httpx.Client, model: str) -> None:
    body = {"model": model, "messages": QUESTION, "max_tokens": 8, "seed": 11, "n": 2}
    first, second = (http.post("/v1/chat/completions", json=body).json() for _ in range(2))
    assert first["choices"] == second["choices"]


def test_null_is_as_omitted(http: httpx.Client, model: str) -> None:
    optional = ChatCompletionRequest.model_fields.keys() - {"model", "messages"}
    optional |= NEUTRAL.keys()
    body = {**dict.fromkeys(optional), "model": model, "messages": QUESTION, "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    optional = CompletionRequest.model_fields.keys() - {"model", "prompt"} | NEUTRAL.keys()
    body = {**dict.fromkeys(optional), "model": model, "prompt": "Hello"}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_unknown_fields_are_ignored(http: httpx.Client, model: str) -> None:
    body = {"model": model, "messages": QUESTION, "max_tokens": 2, "no_such_field": {"a": [1]}}
    body["messages"] = [{**QUESTION[0], "whatever": 1}]
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_the_fingerprint_is_the_same_everywhere(http: httpx.Client, model: str) -> None:
    found = set()
    for route, prompt in (
        ("chat/completions", {"messages": QUESTION}),
        ("completions", {"prompt": "Hello"}),
    ):
        body = {"model": model, "max_tokens": 2, **prompt}
        found.add(http.post(f"/v1/{route}", json=body).json()["system_fingerprint"])
        chunks = events(http.post(f"/v1/{route}", json={**body, "stream": True}))
        found |= {chunk["system_fingerprint"] for chunk in chunks}
    (fingerprint,) = found
    assert fingerprint.startswith("fp_")


def test_models_are_listed_and_found(sdk: openai.OpenAI, model: str) -> None:
    assert [entry.id for entry in sdk.models.list()] == [model]
    assert sdk.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.models.retrieve("no/such-model")
    assert caught.value.code == "model_not_found"


def test_text_goes_to_ids_and_back(http: httpx.Client, model: str) -> None:
    text = "Hello naïve café 日本 👩‍🚀"
    answer = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] > 0
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_probes(http: httpx.Client) -> None:
    for path in ("/live", "/ready", "/health"):
        assert http.get(path).status_code == 200
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")


def test_metrics_have_the_promised_names(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    for name in (
        "plait_requests_running",
        "plait_requests_waiting",
        "plait_prompt_tokens_total",
        "plait_output_tokens_total",
        "plait_cached_tokens_total",
        "plait_ttft_seconds_bucket",
        "plait_itl_seconds_bucket",
        "plait_e2e_seconds_bucket",
        "plait_requests_total",
        "plait_errors_total",
        "plait_aborts_total",
    ):
        assert f"\n{name}" in response.text, name


def test_request_ids_are_made_or_kept(http: httpx.Client) -> None:
    made = http.get("/live").headers["x-request-id"]
    assert made != http.get("/live").headers["x-request-id"]
    kept = http.get("/live", headers={"x-request-id": "mine-1.2:3"})
    assert kept.headers["x-request-id"] == "mine-1.2:3"
    for bad in ("x" * 129, "a b", "a\tb"):
        assert http.get("/live", headers={"x-request-id": bad}).headers["x-request-id"] != bad
    assert "x-request-id" in http.get("/no/such").headers
