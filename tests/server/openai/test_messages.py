"""What a chat's messages become: the prompt that the model goes on with."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.scripted import Server

QUESTION: dict[str, Any] = {"role": "user", "content": "What is the capital of France?"}


def tokenized(http: httpx.Client, *messages: Any, **how: Any) -> list[int]:
    """The prompt that /tokenize says these messages become."""
    answer = http.post("/tokenize", json={"messages": messages, **how})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])


def test_content_parts_of_text_are_read(http: httpx.Client) -> None:
    texts = ("What is the capital", "of France?")
    parts = [{"type": "text", "text": text} for text in texts]
    together = {"role": "user", "content": "\n".join(texts)}
    assert tokenized(http, {"role": "user", "content": parts}) == tokenized(http, together)


def test_a_refusal_is_read_as_what_the_assistant_said(http: httpx.Client, model: str) -> None:
    said = tokenized(http, QUESTION, {"role": "assistant", "content": "I will not."}, QUESTION)
    for refusing in (
        {"content": None, "refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": "I will not.", "refusal": None},
    ):
        messages = [QUESTION, {"role": "assistant", **refusing}, QUESTION]
        assert tokenized(http, *messages) == said
        body = {"model": model, "messages": messages, "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    for wrong, param in (
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "type"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "refusal"),
    ):
        answer = http.post("/v1/chat/completions", json={"model": model, "messages": [wrong]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"messages[0].content[0].{param}"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_what_the_assistant_thought_is_shown_by_templates_that_show_it(
    scripted: Server, name: str
) -> None:
    thought: dict[str, Any] = {"role": "assistant", "content": "Paris.", name: "France: Paris"}
    shown = tokenized(scripted.http, QUESTION, thought, QUESTION)
    text = scripted.http.post("/detokenize", json={"tokens": shown}).json()["prompt"]
    assert "<|im_start|>assistant\n(France: Paris) Paris.<|im_end|>" in text
    without = tokenized(scripted.http, QUESTION, {**thought, name: None}, QUESTION)
    assert without == tokenized(
        scripted.http, QUESTION, {"role": "assistant", "content": "Paris."}, QUESTION
    )
    nulls = dict.fromkeys(("reasoning_content", "reasoning"))
    assert tokenized(scripted.http, QUESTION, {**nulls, **thought}, QUESTION) == shown
    body = {"messages": [{**thought, name: ["so"]}]}
    error = scripted.http.post("/tokenize", json=body).json()["error"]
    assert error["param"] == f"messages[0].{name}"


def test_the_last_message_may_be_continued(http: httpx.Client, model: str) -> None:
    half = {"role": "assistant", "content": "It is Paris, the city"}
    closed = tokenized(http, QUESTION, half, add_generation_prompt=False)
    assert tokenized(http, QUESTION, half)[: len(closed)] == closed
    continued = tokenized(http, QUESTION, half, continue_final_message=True)
    # All but the turn's end.
    assert continued == closed[: len(continued)]
    shown = http.post("/detokenize", json={"tokens": continued}).json()["prompt"]
    assert shown.endswith("It is Paris, the city")
    body = {"model": model, "messages": [QUESTION, half], "max_tokens": 1, "temperature": 0}
    for how, prompt in (
        ({"continue_final_message": True}, continued),
        ({"continue_final_message": True, "add_generation_prompt": False}, continued),
        ({"add_generation_prompt": False}, closed),
    ):
        answer = http.post("/v1/chat/completions", json={**body, **how}).json()
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        raw = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        same = http.post("/v1/completions", json=raw).json()
        assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]
