"""What would change the answer and is not done here is a 400; what asks for nothing else is not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}

# By the names and with the values that clients of other servers send.
REFUSED: list[tuple[str, Any]] = [
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    ("response_format", {"type": "json_object"}),
    ("response_format", {}),
    ("tools", [TOOL]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("guided_json", SCHEMA),
    ("guided_json", {}),  # any JSON, but JSON
    ("guided_json", '{"type": "object"}'),
    ("guided_regex", "[0-9]+"),
    ("guided_choice", ["yes", "no"]),
    ("guided_grammar", 'root ::= "yes"'),
    ("structured_outputs", {"json": SCHEMA}),
    ("structured_outputs", {"choice": ["yes", "no"], "regex": None}),
    ("structural_tag", '{"format": {}}'),
    ("json_schema", "{}"),
    ("regex", "[0-9]+"),
    ("ebnf", 'root ::= "yes"'),
    ("grammar", 'root ::= "yes"'),
    ("allowed_token_ids", [1, 2]),
    ("bad_words", ["no"]),
    ("extra_body", {"guided_json": SCHEMA}),
    ("nvext", {"guided_choice": ["yes", "no"]}),
    ("chat_template", "{{ messages }}"),
    ("documents", [{"title": "a", "text": "b"}]),
    ("web_search_options", {}),
    ("truncate_prompt_tokens", 5),
    ("prompt_logprobs", 0),
    ("cache_salt", "mine"),
    ("use_beam_search", True),
    ("repeat_penalty", 1.1),
    ("mirostat", 2),
    ("include_stop_str_in_output", True),
    ("return_token_ids", True),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x", "format": "wav"}),
    ("suffix", "end"),
    # llama.cpp
    ("n_predict", 64),
    ("n_predict", -1),
    ("n_probs", 5),
    ("top_n_sigma", 1.5),
    ("dynatemp_range", 0.5),
    ("repeat_last_n", 64),
    ("samplers", ["top_k", "temperature"]),
    ("lora", [{"id": 0, "scale": 0.5}]),
    ("t_max_predict_ms", 1000),
    ("reasoning_format", "deepseek"),
    # TGI
    ("max_new_tokens", 20),
    ("do_sample", False),
    ("stop_sequences", ["."]),
    ("truncate", 100),
    ("watermark", True),
    ("return_full_text", True),
    ("decoder_input_details", True),
    ("top_n_tokens", 5),
    ("adapter_id", "mine"),
    ("parameters", {"max_new_tokens": 20}),
    # vLLM
    ("logprob_token_ids", [1, 2]),
    ("thinking_token_budget", 100),
    ("repetition_detection", {"max_pattern_size": 4}),
    ("include_reasoning", False),
    ("vllm_xargs", {"kl": 0.5}),
    # SGLang
    ("input_ids", [1, 2]),
    ("extra_key", "mine"),
    ("separate_reasoning", True),
    ("return_routed_experts", True),
    ("sampling_params", {"max_new_tokens": 20}),
    # TabbyAPI
    ("top_a", 0.2),
    ("tfs", 0.9),
    ("smoothing_factor", 0.3),
    ("max_temp", 2),
    ("banned_tokens", [128, 330]),
    ("banned_strings", ["no"]),
    ("ban_eos_token", True),
    ("negative_prompt", "no"),
    ("response_prefix", "Sure"),
    ("enable_thinking", False),
    ("reasoning", {"enabled": False}),
    # Ollama
    ("options", {"num_predict": 20}),
    ("format", "json"),
    ("system", "be brief"),
    ("think", False),
]
# Other clients' defaults: each is what happens anyway.
NEUTRAL: dict[str, Any] = {
    "response_format": {"type": "text", "json_schema": None},
    "tools": [],
    "tool_choice": "auto",
    "functions": [],
    "function_call": "none",
    "guided_json": None,
    "guided_choice": [],
    "structured_outputs": {"json": None, "regex": None},
    "documents": [],
    "use_beam_search": False,
    "repeat_penalty": 1.0,
    "typical_p": 1,
    "mirostat": 0,
    "modalities": ["text"],
    "suffix": "",
    "echo": False,
    "best_of": 1,
    "extra_body": {},
    "samplers": None,
    "n_predict": None,
    "n_probs": 0,
    "top_a": 0.0,
    "tfs": 1,
    "top_n_sigma": -1,
    "repetition_penalty_range": -1,
    "mirostat_mode": 0,
    "dynatemp_low": 1.0,
    "dynatemp_high": 1.0,
    "do_sample": True,
    "watermark": False,
    "banned_tokens": "",
    "stop_sequences": [],
    "add_bos_token": True,
    "include_reasoning": True,
    "reasoning_format": "auto",
    "options": {"num_predict": None},
    # Hints, and what is about the call and not the answer.
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "service_tier": "auto",
    "store": False,
    "metadata": {"trace": "1"},
    "guided_decoding_backend": "auto",
}


def post(http: httpx.Client, model: str, route: str, **fields: Any) -> httpx.Response:
    prompt: dict[str, Any] = {"prompt": "x"}
    if route == CHAT:
        prompt = {"messages": [{"role": "user", "content": "x"}]}
    return http.post(route, json={"model": model, "max_tokens": 2, **prompt, **fields})


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("field", "value"), REFUSED, ids=[f"{name}-{value!s:.20}" for name, value in REFUSED]
)
def test_what_would_change_the_answer_is_refused_by_name(
    http: httpx.Client, model: str, route: str, field: str, value: Any
) -> None:
    answer = post(http, model, route, **{field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert error["message"].startswith(f"{field} is not supported; accepted is ")


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_defaults_that_clients_send_are_accepted(
    http: httpx.Client, model: str, route: str
) -> None:
    plain = post(http, model, route, temperature=0).json()
    answer = post(http, model, route, temperature=0, **NEUTRAL)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("offered", "choice"),
    [({"tools": [TOOL]}, "tool_choice"), ({"functions": [{}]}, "function_call")],
)
def test_tools_that_may_not_be_called_are_accepted(
    http: httpx.Client, model: str, offered: dict[str, Any], choice: str
) -> None:
    assert post(http, model, CHAT, **offered, **{choice: "none"}).status_code == 200
    assert post(http, model, CHAT, **offered, **{choice: "auto"}).status_code == 400


@pytest.mark.parametrize(
    ("field", "value", "here"),
    [
        ("n_predict", 64, "max_tokens"),
        ("max_new_tokens", 64, "max_tokens"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("stop_sequence", ["."], "stop"),
        ("think", True, "chat_template_kwargs"),
    ],
)
def test_a_field_that_is_here_by_another_name_is_told(
    http: httpx.Client, model: str, field: str, value: Any, here: str
) -> None:
    message = post(http, model, CHAT, **{field: value}).json()["error"]["message"]
    assert message.endswith(f"; here it is {here}")


def test_no_route_is_told_a_name_that_it_does_not_read(http: httpx.Client, model: str) -> None:
    error = post(http, model, COMPLETION, enable_thinking=False).json()["error"]
    assert error["message"] == "enable_thinking is not supported; accepted is null"


def test_top_logprobs_are_for_chats(http: httpx.Client, model: str) -> None:
    assert post(http, model, CHAT, logprobs=True, top_logprobs=1).status_code == 200
    refused = post(http, model, COMPLETION, logprobs=1, top_logprobs=1)
    assert refused.json()["error"]["param"] == "top_logprobs"


def test_a_template_makes_its_own_special_tokens(http: httpx.Client, model: str) -> None:
    assert post(http, model, COMPLETION, add_special_tokens=True).status_code == 200
    refused = post(http, model, CHAT, add_special_tokens=True)
    assert refused.json()["error"]["param"] == "add_special_tokens"


def test_echo_is_for_completions(http: httpx.Client, model: str) -> None:
    assert post(http, model, COMPLETION, echo=True).status_code == 200
    assert post(http, model, CHAT, echo=True).json()["error"]["param"] == "echo"


def test_what_is_tokenized_is_what_chat_would_read(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x"}]
    for field, value in (("tools", [TOOL]), ("chat_template", "{{ messages }}")):
        answer = http.post("/tokenize", json={"messages": messages, field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_calls", [{"id": "1", "type": "function", "function": {"name": "f"}}]),
        ("function_call", {"name": "f", "arguments": "{}"}),
    ],
)
def test_calls_of_earlier_turns_are_refused(
    http: httpx.Client, model: str, field: str, value: Any
) -> None:
    called = {"role": "assistant", "content": None, field: value}
    messages = [called, {"role": "user", "content": "x"}]
    refused = post(http, model, CHAT, messages=messages)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"messages[0].{field}"
