"""Request bodies as clients send them: names, types and fixed bounds of every field that is read.

Null is the same as absent, a wrong value is refused. Of the fields that are not read refusals.py
refuses some, the others are ignored. Knows no model: what depends on vocabulary, context or
configuration is checked in sampling.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import Request
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from starlette.requests import ClientDisconnect

from server.chat_template import RESERVED
from server.openai import refusals
from server.openai.errors import APIError, from_validation

M = TypeVar("M", bound=BaseModel)

INT64_MAX = 2**63 - 1
PRIORITY_MAX = 2**31 - 1
EXACT_MAX = 2**53  # beyond it a float may stand for another whole number

TokenIds = list[Annotated[int, Field(ge=0, le=INT64_MAX)]]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())


class OpenBody(Body):
    """Keeps what it does not name."""

    model_config = ConfigDict(extra="allow")

    def check_rest(self) -> None:
        """Raises APIError 400 where something is asked for that nobody does."""
        refusals.check(self.model_extra or {}, type(self).model_fields)


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationBody(OpenBody):
    """What both generating routes accept."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    # Beyond OpenAI's own, by the names that other servers gave them.
    top_k: Annotated[int, Field(ge=-1, le=PRIORITY_MAX)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    # Ours: keep the prompt's prefix cached for so many seconds.
    pin_prefix_s: Annotated[int, Field(ge=0, le=PRIORITY_MAX)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Of the answer, as asked for by the newer name or the older one."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ContentPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    # What the assistant thought before, for templates that show it, by either of its names.
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None


class Rendering(OpenBody):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, bool | int | Finite | str | None] | None = None

    @field_validator("continue_final_message")
    @classmethod
    def _is_the_end(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("accepted is one of this and add_generation_prompt")
        return value

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _has_no_field_of_the_body(cls, value: object) -> object:
        others = RESERVED | {"chat_template", "continue_final_message"}
        for name in others.intersection(value) if isinstance(value, dict) else ():
            raise ValueError(f"{name} is no variable of the template's own")
        return value


class ChatCompletionRequest(GenerationBody, Rendering):
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class CompletionRequest(GenerationBody):
    prompt: SkipValidation[str | list[str] | TokenIds | list[TokenIds]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None  # refused unless it asks for what happens anyway

    @field_validator("prompt", mode="after")
    @classmethod
    def _is_prompt(cls, value: object) -> object:
        # By hand: a union of list types reports every element of the branches that fail.
        if isinstance(value, str) or _is_token_ids(value):
            return value
        if isinstance(value, list) and (
            all(isinstance(item, str) for item in value) or all(map(_is_token_ids, value))
        ):
            return value
        raise ValueError(
            "accepted is a string, a list of strings, a list of token ids or a list of such lists"
        )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= INT64_MAX for item in value
    )


class TokenizeRequest(Rendering):
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ]
        }
    )
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None


def _number(text: str) -> int | float:
    """JSON has one kind of number: 4.0 is a whole one, and some clients write it so."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= EXACT_MAX else value


_decode = msgspec.json.Decoder(float_hook=_number).decode


async def read_body(request: Request, kind: type[M]) -> M:
    """The request's body. Raises APIError: 400 for malformed JSON or a wrong field (with `param`),
    415 for another content type."""
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if media_type.lower() != "application/json":
        raise APIError(
            f"the content type is {media_type[:80]!r}; accepted is application/json",
            status=415,
            code="unsupported_media_type",
        )
    try:
        body = await request.body()
    except ClientDisconnect as error:  # nobody reads the answer; it is counted, not logged
        raise APIError("the client left", status=499, code="client_disconnected") from error
    try:
        value = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise APIError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise APIError("the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from error
