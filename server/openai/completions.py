"""POST /v1/completions.

Prompts are raw: text that spells a special token is one, as clients that apply a chat template
themselves need it. Whoever puts strangers' text into a prompt uses chat, where that cannot happen.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.types import Request, SamplingParams, TokenLogprob
from server.answer import Delta
from server.dispatch.fleet import Capabilities
from server.generation import Submission
from server.openai import sampling
from server.openai.api import Api, system_fingerprint
from server.openai.errors import invalid, unsupported
from server.openai.logprobs import CompletionLogprobs
from server.openai.respond import respond
from server.openai.schema import CompletionRequest, read_body
from server.openai.sse import event
from server.openai.usage import Usage
from server.tokenizer import Tokenizer

ROUTE = "/v1/completions"
DEFAULT_MAX_TOKENS = 16  # the reference's


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str  # what echo gives back
    token_ids: list[int]


async def create(api: Api, http: HttpRequest) -> Response:
    body = await read_body(http, CompletionRequest)
    api.check_model(body.model)
    given = _split(body)
    _check(body, api, len(given))
    capabilities = await api.capabilities()
    prompts = [await _read_prompt(api, body, prompt, capabilities) for prompt in given]
    rid = f"cmpl-{uuid.uuid4().hex}"
    n = body.n or 1
    submissions = []
    for number, prompt in enumerate(prompts):
        seed = sampling.draw_seed(body)
        for place in range(n):
            choice = number * n + place
            request = Request(
                rid=f"{rid}-{choice}",
                token_ids=prompt.token_ids,
                sampling=_params(api, body, prompt, capabilities, seed, place),
                priority=body.priority or 0,
                pin_s=body.pin_prefix_s or 0,
            )
            skip = body.skip_special_tokens is not False
            submissions.append(Submission(request, choice, tuple(body.stops), skip, continues=True))
    usage = Usage(sum(len(prompt.token_ids) for prompt in prompts), n)
    completion = _Completion(rid, body, prompts, usage, api.tokenizer, capabilities)
    return await respond(api, http, submissions, ROUTE, completion, usage, bool(body.stream))


def _params(
    api: Api,
    body: CompletionRequest,
    prompt: _Prompt,
    capabilities: Capabilities,
    seed: int,
    place: int,
) -> SamplingParams:
    # The prompt's log-probabilities are the same for all choices; the first one brings them.
    with_prompt = body.echo and body.logprobs is not None and place == 0
    return sampling.sampling_params(
        body,
        capabilities,
        num_prompt_tokens=len(prompt.token_ids),
        max_tokens=body.most_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        eos_token_ids=api.tokenizer.eos_token_ids,
        defaults=api.tokenizer.sampling_defaults,
        param="prompt",
        seed=sampling.choice_seed(seed, place),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if with_prompt else None,
    )


def _split(body: CompletionRequest) -> list[str | list[int]]:
    """One entry a prompt. Raises APIError 400 for an empty one."""
    given = body.prompt
    prompts: list[str | list[int]] = []
    if isinstance(given, str):
        prompts = [given]
    elif given and isinstance(given[0], int):
        prompts = [[token_id for token_id in given if isinstance(token_id, int)]]
    else:
        prompts = [prompt for prompt in given if not isinstance(prompt, int)]
    if not prompts or [] in prompts:
        raise invalid("prompt", "prompt is an empty list: at least one token is needed")
    return prompts


def _check(body: CompletionRequest, api: Api, num_prompts: int) -> None:
    """Raises APIError 400 for what exceeds a limit or is not supported."""
    sampling.check(body, api.config, num_prompts)
    if body.logprobs is not None:
        sampling.check_logprobs("logprobs", body.logprobs, api.config)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f" where it is {body.best_of}; accepted is the value of n")


async def _read_prompt(
    api: Api, body: CompletionRequest, prompt: str | list[int], capabilities: Capabilities
) -> _Prompt:
    tokenizer = api.tokenizer
    if isinstance(prompt, str):
        api.check_length(prompt, capabilities.context_length, "prompt")
        token_ids = await tokenizer.run(
            tokenizer.encode, prompt, add_special_tokens=body.add_special_tokens is not False
        )
        if not token_ids:
            raise invalid("prompt", f"prompt is {prompt!r}: at least one token is needed")
        return _Prompt(prompt, token_ids)
    sampling.check_token_ids("prompt", prompt, capabilities)
    text = await tokenizer.run(tokenizer.decode, prompt) if body.echo else ""
    return _Prompt(text, prompt)


class _Completion:
    """Both forms of the answer: Chunks for a stream, `body` for one piece."""

    def __init__(
        self,
        rid: str,
        body: CompletionRequest,
        prompts: Sequence[_Prompt],
        usage: Usage,
        tokenizer: Tokenizer,
        capabilities: Capabilities,
    ) -> None:
        self._head = {
            "id": rid,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": system_fingerprint(capabilities),
        }
        self._n = body.n or 1
        self._prompts = prompts
        self._echo = bool(body.echo)
        self._num_choices = self._n * len(prompts)
        self._with_usage = body.wants_usage_chunk
        self._usage = usage
        skip = body.skip_special_tokens is not False
        self._logprobs: list[CompletionLogprobs] | None = None
        if body.logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(tokenizer.token_bytes, skip) for _ in range(self._num_choices)
            ]

    def opening(self, deltas: Sequence[Delta]) -> bytes | None:
        """The echoed prompts; or an empty chunk for each choice, so that they come in order."""
        prompt_logprobs = self._prompt_logprobs(deltas)
        if self._echo and self._logprobs is not None and len(prompt_logprobs) < len(self._prompts):
            return None
        if not self._echo and self._num_choices == 1:
            return b""
        pieces = []
        for choice in range(self._num_choices):
            entry = self._echoed(choice, prompt_logprobs) if self._echo else ("", None)
            pieces.append(self._event(choice, *entry))
        return b"".join(pieces)

    def delta(self, delta: Delta) -> bytes:
        lists = self._lists(delta.choice, delta.logprobs) if delta.logprobs else None
        return self._event(delta.choice, delta.text, lists)

    def finish(self, delta: Delta) -> bytes:
        return self._event(delta.choice, "", None, delta.finish_reason)

    def closing(self) -> bytes:
        if not self._with_usage:
            return b""
        return event({**self._chunk([]), "usage": self._usage.body()})

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        texts = [[self._prompts[c // self._n].text] if self._echo else [] for c in self._choices]
        logprobs: list[list[TokenLogprob]] = [[] for _ in self._choices]
        reasons: list[str | None] = [None for _ in self._choices]
        for delta in deltas:
            texts[delta.choice].append(delta.text)
            logprobs[delta.choice] += delta.logprobs
            reasons[delta.choice] = delta.finish_reason or reasons[delta.choice]
        prompt_logprobs = self._prompt_logprobs(deltas)
        choices = []
        for choice in self._choices:
            lists = self._echoed(choice, prompt_logprobs)[1] if self._echo else None
            if self._logprobs is not None:
                more = self._lists(choice, logprobs[choice])
                lists = {key: lists[key] + more[key] for key in lists} if lists else more
            choices.append(_choice(choice, "".join(texts[choice]), lists, reasons[choice]))
        return {**self._chunk(choices), "usage": self._usage.body()}

    @property
    def _choices(self) -> range:
        return range(self._num_choices)

    def _prompt_logprobs(self, deltas: Sequence[Delta]) -> dict[int, Sequence[TokenLogprob | None]]:
        """By prompt, of those that came."""
        found: dict[int, Sequence[TokenLogprob | None]] = {}
        for delta in deltas:
            if delta.choice % self._n == 0:
                found.setdefault(delta.choice // self._n, delta.prompt_logprobs)
        return found

    def _echoed(
        self, choice: int, prompt_logprobs: dict[int, Sequence[TokenLogprob | None]]
    ) -> tuple[str, dict[str, Any] | None]:
        number = choice // self._n
        prompt = self._prompts[number]
        if self._logprobs is None:
            return prompt.text, None
        lists = self._logprobs[choice].lists(prompt.token_ids, prompt_logprobs[number])
        return prompt.text, lists

    def _lists(self, choice: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        assert self._logprobs is not None
        return self._logprobs[choice].lists([item.token_id for item in logprobs], logprobs)

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def _event(
        self, choice: int, text: str, lists: dict[str, Any] | None, reason: str | None = None
    ) -> bytes:
        return event(self._chunk([_choice(choice, text, lists, reason)]))


def _choice(
    choice: int, text: str, lists: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": lists, "finish_reason": reason}
