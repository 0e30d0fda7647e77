"""What every route of the API works with, and the checks that all of them share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server.chat_template import TemplateError
from server.dispatch.client import EngineClient
from server.dispatch.fleet import Capabilities
from server.generation import EngineError
from server.openai.errors import APIError, invalid, overloaded
from server.openai.schema import Message, Rendering
from server.options.config import ServeConfig
from server.tokenizer import Tokenizer


@dataclass(frozen=True)
class Api:
    config: ServeConfig
    client: EngineClient
    tokenizer: Tokenizer
    started_at: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str) -> None:
        if name != self.config.model_name:
            raise APIError(
                f"the model {name[:200]!r} does not exist; this server has "
                f"{self.config.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def capabilities(self) -> Capabilities:
        try:
            return await self.client.capabilities()
        except EngineError as error:
            raise from_engine(error) from error

    async def encode_chat(
        self,
        messages: Sequence[Message],
        how: Rendering,
    ) -> list[int]:
        plain = [_plain(place, message) for place, message in enumerate(messages)]
        try:
            return await self.tokenizer.run(
                self.tokenizer.encode_chat,
                plain,
                add_generation_prompt=how.add_generation_prompt is not False,
                continue_final_message=bool(how.continue_final_message),
                variables=how.chat_template_kwargs,
            )
        except TemplateError as error:
            raise invalid("messages", str(error)) from error

    def check_length(self, text: str, context_length: int, param: str) -> None:
        """Refuse at once what cannot fit, before it is tokenized at length."""
        longest = self.tokenizer.token_bytes.longest
        if self.tokenizer.has_normalizer or not longest:
            return
        least = len(text) // longest  # characters; bytes are not fewer
        if least > context_length:
            raise context_exceeded(f"at least {least}", 0, context_length, param)


def system_fingerprint(capabilities: Capabilities) -> str | None:
    """Equal while the same seed says the same; None where nothing tells the weights."""
    model = capabilities.model_id
    return "_".join(["fp", model.fingerprint, *model.names]) if model.fingerprint else None


def from_engine(error: EngineError) -> APIError:
    if error.kind == "worker_error":
        return APIError(str(error), status=500, code=error.kind)
    return overloaded(str(error), code=error.kind)


def context_exceeded(
    num_prompt: int | str, max_tokens: int, context_length: int, param: str
) -> APIError:
    """With both numbers, whatever exceeds: the prompt alone, or with the tokens asked for."""
    asked = f" and {max_tokens} tokens are asked for" if max_tokens else ""
    return APIError(
        f"the prompt has {num_prompt} tokens{asked}, but this model's context is "
        f"{context_length} tokens, prompt and answer together; shorten the prompt or lower "
        "max_tokens",
        param=param,
        code="context_length_exceeded",
    )


def _plain(place: int, message: Message) -> dict[str, Any]:
    """A message as templates expect it: text content in one string, no absent keys."""
    plain = message.model_dump(exclude_none=True, exclude={"content", "refusal", "reasoning"})
    if message.reasoning is not None:
        plain.setdefault("reasoning_content", message.reasoning)
    # A refusal is what the assistant said: templates know it as content only.
    own = message.role == "assistant"
    content = message.content
    if own and message.refusal and not content:
        content = message.refusal
    if content is None and not message.tool_calls:
        raise invalid(
            f"messages[{place}].content",
            f"messages[{place}].content is null: accepted is a string or a list of content parts",
        )
    if isinstance(content, list):
        texts = []
        for number, part in enumerate(content):
            where = f"messages[{place}].content[{number}]"
            kind = part.type
            if kind != "text" and not (own and kind == "refusal"):
                raise invalid(
                    f"{where}.type",
                    f"{where}.type is {kind[:80]!r}: this model reads text only; accepted is "
                    "'text', and 'refusal' of the assistant",
                )
            text = part.text if kind == "text" else part.refusal
            if text is None:
                raise invalid(f"{where}.{kind}", f"{where}.{kind} is required")
            texts.append(text)
        content = "\n".join(texts)
    return {**plain, "content": content}
