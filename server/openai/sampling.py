"""From a validated body to SamplingParams: what depends on configuration, vocabulary and context.

Owns defaults and refusals. Knows no HTTP beyond the shape of its errors.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from engine.types import SamplingParams
from server.dispatch.fleet import Capabilities
from server.openai.api import context_exceeded
from server.openai.errors import invalid
from server.openai.schema import GenerationBody
from server.options.config import ServeConfig

MAX_STOP_TOKEN_IDS = 256

_SEEDS = 2**63
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that n choices of one seed never share one


def check(body: GenerationBody, config: ServeConfig, num_prompts: int = 1) -> None:
    """All limits that need no token: asked before anything is copied or computed.

    Raises APIError 400 with `param`.
    """
    body.check_rest()
    n = body.n or 1
    if n > config.max_n:
        raise invalid("n", f"n is {n}: at most {config.max_n} choices are accepted")
    if n * num_prompts > config.max_queued_requests:
        raise invalid(
            "prompt",
            f"{num_prompts} prompts with n = {n} make {n * num_prompts} choices: at most "
            f"{config.max_queued_requests} are accepted",
        )
    if len(body.stops) > config.max_stop_strings:
        raise invalid(
            "stop",
            f"stop has {len(body.stops)} strings: at most {config.max_stop_strings} are accepted",
        )
    if "" in body.stops:
        raise invalid("stop", 'stop holds "": every stop string must have a character')
    num_stop_ids = len(body.stop_token_ids or ())
    if num_stop_ids > MAX_STOP_TOKEN_IDS:
        raise invalid(
            "stop_token_ids",
            f"stop_token_ids has {num_stop_ids} ids: at most {MAX_STOP_TOKEN_IDS} are accepted",
        )
    num_biases = len(body.logit_bias or ())
    if num_biases > config.max_logit_bias:
        raise invalid(
            "logit_bias",
            f"logit_bias has {num_biases} entries: at most {config.max_logit_bias} are accepted",
        )
    if (body.pin_prefix_s or 0) > config.max_pin_s:
        raise invalid(
            "pin_prefix_s",
            f"pin_prefix_s is {body.pin_prefix_s}: at most {config.max_pin_s} seconds are accepted",
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only accepted with stream: true")


def check_logprobs(param: str, value: int, config: ServeConfig) -> None:
    if value > config.max_logprobs:
        raise invalid(param, f"{param} is {value}: at most {config.max_logprobs} is accepted")


def draw_seed(body: GenerationBody) -> int:
    """The client's seed, or a random one; within [0, 2**63)."""
    return secrets.randbelow(_SEEDS) if body.seed is None else body.seed % _SEEDS


def choice_seed(seed: int, choice: int) -> int:
    """Choice 0 has the request's own seed: it equals what n = 1 gives."""
    return (seed + choice * _SEED_STEP) % _SEEDS


def sampling_params(
    body: GenerationBody,
    capabilities: Capabilities,
    *,
    num_prompt_tokens: int,
    max_tokens: int | None,  # as asked for
    default_max_tokens: int | None,  # None: all that the context leaves
    eos_token_ids: tuple[int, ...],
    param: str,  # the field that holds the prompt
    seed: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    defaults: Mapping[str, float],  # the model's own, by the fields' names
) -> SamplingParams:
    """Raises APIError 400: context_length_exceeded, or an id outside the vocabulary."""
    context_length = capabilities.context_length
    room = context_length - num_prompt_tokens
    if max_tokens is None:
        if room < 1:
            raise context_exceeded(num_prompt_tokens, 0, context_length, param)
        max_tokens = room if default_max_tokens is None else min(default_max_tokens, room)
    elif max_tokens > room:
        raise context_exceeded(num_prompt_tokens, max_tokens, context_length, param)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            "min_tokens",
            f"min_tokens is {min_tokens}: at most max_tokens, {max_tokens}, is accepted",
        )
    stop_ids = [*(body.stop_token_ids or ())]
    _check_ids("stop_token_ids", stop_ids, capabilities.vocab_size)
    if not body.ignore_eos:
        stop_ids += eos_token_ids
    top_p = _given(body.top_p, defaults, "top_p", 1.0)
    # top_p 0 keeps the likeliest token only, which is what top_k 1 says exactly.
    only_best = top_p == 0
    top_k = 1 if only_best else int(_given(body.top_k, defaults, "top_k", 0))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_given(body.temperature, defaults, "temperature", 1.0),
        top_p=1.0 if only_best else top_p,
        top_k=max(top_k, 0),
        min_p=_given(body.min_p, defaults, "min_p", 0.0),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, defaults, "repetition_penalty", 1.0),
        logit_bias=_logit_bias(body, capabilities.vocab_size),
        seed=seed,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _given(value: float | None, defaults: Mapping[str, float], name: str, neutral: float) -> float:
    """The client's value, else the model's, else the reference's."""
    return defaults.get(name, neutral) if value is None else value


def check_token_ids(param: str, token_ids: list[int], capabilities: Capabilities) -> None:
    _check_ids(param, token_ids, capabilities.vocab_size)


def _check_ids(param: str, token_ids: list[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise invalid(
            param, f"{param} holds the token id {largest}: accepted are 0 to {vocab_size - 1}"
        )


def _logit_bias(body: GenerationBody, vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 20 else -1
        if not 0 <= token_id < vocab_size:
            raise invalid(
                "logit_bias",
                f"logit_bias has the key {key[:80]!r}: accepted are token ids, 0 to "
                f"{vocab_size - 1}",
            )
        biases[token_id] = bias
    return biases
