"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.types import Request
from server.answer import Delta
from server.detokenizer import TokenBytes
from server.dispatch.fleet import Capabilities
from server.generation import Submission
from server.openai import sampling
from server.openai.api import Api, system_fingerprint
from server.openai.errors import invalid, unsupported
from server.openai.logprobs import chat_entries
from server.openai.respond import respond
from server.openai.schema import ChatCompletionRequest, read_body
from server.openai.sse import event
from server.openai.usage import Usage

ROUTE = "/v1/chat/completions"


async def create(api: Api, http: HttpRequest) -> Response:
    body = await read_body(http, ChatCompletionRequest)
    api.check_model(body.model)
    _check(body, api)
    capabilities = await api.capabilities()
    for place, message in enumerate(body.messages):
        if isinstance(message.content, str):
            param = f"messages[{place}].content"
            api.check_length(message.content, capabilities.context_length, param)
    token_ids = await api.encode_chat(body.messages, body)
    seed = sampling.draw_seed(body)
    rid = f"chatcmpl-{uuid.uuid4().hex}"
    submissions = []
    for choice in range(body.n or 1):
        params = sampling.sampling_params(
            body,
            capabilities,
            num_prompt_tokens=len(token_ids),
            max_tokens=body.most_tokens,
            default_max_tokens=None,
            eos_token_ids=api.tokenizer.eos_token_ids,
            defaults=api.tokenizer.sampling_defaults,
            param="messages",
            seed=sampling.choice_seed(seed, choice),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        request = Request(
            rid=f"{rid}-{choice}",
            token_ids=token_ids,
            sampling=params,
            priority=body.priority or 0,
            pin_s=body.pin_prefix_s or 0,
        )
        skip = body.skip_special_tokens is not False
        continues = bool(body.continue_final_message)
        submissions.append(Submission(request, choice, tuple(body.stops), skip, continues))
    usage = Usage(len(token_ids), len(submissions))
    chat = _Chat(rid, body, usage, api.tokenizer.token_bytes, capabilities)
    return await respond(api, http, submissions, ROUTE, chat, usage, bool(body.stream))


def _check(body: ChatCompletionRequest, api: Api) -> None:
    """Raises APIError 400 for what this model or server does not do."""
    sampling.check(body, api.config)
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) == 0:
            raise invalid(name, f"{name} is 0: at least 1 is accepted")
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs is only accepted with logprobs: true")
        sampling.check_logprobs("top_logprobs", body.top_logprobs, api.config)
    for place, message in enumerate(body.messages):
        for name in ("tool_calls", "function_call"):
            if getattr(message, name):
                raise unsupported(f"messages[{place}].{name}")


class _Chat:
    """Both forms of the answer: Chunks for a stream, `body` for one piece."""

    def __init__(
        self,
        rid: str,
        body: ChatCompletionRequest,
        usage: Usage,
        table: TokenBytes,
        capabilities: Capabilities,
    ) -> None:
        self._head = {
            "id": rid,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": system_fingerprint(capabilities),
        }
        self._n = body.n or 1
        self._with_logprobs = bool(body.logprobs)
        self._with_usage = body.wants_usage_chunk
        self._usage = usage
        self._table = table
        # A chunk is mostly the same bytes: only text, log-probabilities and index change.
        whole = msgspec.json.encode(self._chunk([]))
        self._before = b"data: " + whole[: whole.index(b'"choices":[') + len(b'"choices":[')]
        self._after = whole[len(self._before) - len(b"data: ") :] + b"\n\n"

    def opening(self, deltas: Sequence[Delta]) -> bytes | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._event(choice, delta) for choice in range(self._n))

    def delta(self, delta: Delta) -> bytes:
        return b"".join(
            (
                self._before,
                b'{"index":%d,"delta":{"content":' % delta.choice,
                msgspec.json.encode(delta.text),
                b'},"logprobs":',
                msgspec.json.encode(self._logprobs(delta)) if delta.logprobs else b"null",
                b',"finish_reason":null}',
                self._after,
            )
        )

    def finish(self, delta: Delta) -> bytes:
        return self._event(delta.choice, {}, delta.finish_reason)

    def closing(self) -> bytes:
        if not self._with_usage:
            return b""
        return event({**self._chunk([]), "usage": self._usage.body()})

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in range(self._n)]
        entries: list[list[Any]] = [[] for _ in range(self._n)]
        reasons: list[str | None] = [None] * self._n
        for delta in deltas:
            texts[delta.choice].append(delta.text)
            entries[delta.choice] += chat_entries(delta.logprobs, self._table)
            reasons[delta.choice] = delta.finish_reason or reasons[delta.choice]
        choices = [
            {
                "index": choice,
                "message": {
                    "role": "assistant",
                    "content": "".join(texts[choice]),
                    "refusal": None,
                },
                "logprobs": (
                    {"content": entries[choice], "refusal": None} if self._with_logprobs else None
                ),
                "finish_reason": reasons[choice],
            }
            for choice in range(self._n)
        ]
        return {
            **self._chunk(choices),
            "object": "chat.completion",
            "usage": self._usage.body(),
        }

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def _event(self, choice: int, delta: dict[str, Any], reason: str | None = None) -> bytes:
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event(self._chunk([entry]))

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return {"content": chat_entries(delta.logprobs, self._table), "refusal": None}
