"""Messages to prompt text, as Hugging Face chat templates define it, in a jinja sandbox.

Owns the rendering and the guard of control tokens: text that spells one inside a message is marked,
so that the tokenizer can keep it text. Knows no tokenizer and no HTTP.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Noncharacters: no text has a use for them, and templates neither trim nor split at them.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))

# White space that templates trim as any other, and do not write themselves.
_SPACE = "\u2003"

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class TemplateError(ValueError):
    """The template refuses these messages, or cannot render them."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template.

    `special_tokens` are the names a template may use (bos_token, eos_token, …). `control_tokens`
    may not be spelled by any message; `spelled_tokens` are added tokens without the special flag:
    where the template itself writes one it is a control token too, except in the assistant's own
    messages, which templates search for them (end of reasoning).

    Raises TemplateError when the source is not a template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_tokens: Iterable[str],
        spelled_tokens: Iterable[str] = (),
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        control = {token for token in control_tokens if token}
        spelled = {token for token in spelled_tokens if token.strip() and token in source}
        self._assistant_guard = _guard(control)
        self._guard = _guard(control | spelled)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The prompt's text in pieces. Joined they are the text; a control token that a message
        spelled lies across the border of two pieces, so tokenizing each by itself keeps it text.
        Without such a message there is one piece, exactly what Hugging Face renders. With
        `continue_final_message` the text ends where the last message's content does, so that the
        model goes on with it; there is no generation prompt then.

        Raises TemplateError with what the template says about these messages.
        """
        everything = json.dumps([messages, variables], ensure_ascii=False, default=str)
        unused = [mark for mark in _MARKS if mark not in everything]
        if len(unused) < 2:
            raise TemplateError("the messages use 31 of the 32 noncharacters U+FDD0 to U+FDEF")
        mark, end = unused[:2]
        marked = [self._mark_message(message, mark) for message in messages]
        content = marked[-1].get("content") if marked else None
        if continue_final_message:
            if not isinstance(content, str):
                raise TemplateError("the final message has no content to continue")
            marked[-1]["content"] = content + end + _SPACE
        names = {
            key: _marked(value, self._guard, mark)
            for key, value in (variables or {}).items()
            if key not in RESERVED and key not in self._special_tokens
        }
        try:
            text = self._template.render(
                messages=marked,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **self._special_tokens,
                **names,
            )
        except TemplateError:
            raise
        # Templates compute with what messages hold; any error of theirs is about that.
        except Exception as error:
            message = str(error).replace(mark, "").replace(end, "")
            raise TemplateError(f"the chat template cannot render these messages: {message}") from (
                error
            )
        if continue_final_message:
            text = _cut(text, end, str(content))
        return text.split(mark)

    def _mark_message(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        own = message.get("role") == "assistant"
        guard = self._assistant_guard if own else self._guard
        return {key: _marked(value, guard, mark) for key, value in message.items()}


def _cut(text: str, end: str, content: str) -> str:
    """`text` as far as `content`, which `end` and a space follow."""
    before, found, after = text.rpartition(end)
    if not found:
        raise TemplateError("the chat template does not show the final message")
    # Where the template has shown it before.
    before = before.replace(end + _SPACE, "").replace(end, "")
    if after.startswith(_SPACE):
        return before
    # The template trims: without the mark it had trimmed the content's own end as well. What is
    # blank it has trimmed from the other side already.
    num_blank = len(content) - len(content.rstrip()) if content.strip() else 0
    return before[: len(before) - num_blank]


def _guard(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the first character of every token that a text spells, overlapping ones too."""
    by_first: dict[str, list[str]] = {}
    for token in sorted(tokens):
        by_first.setdefault(token[0], []).append(re.escape(token[1:]))
    if not by_first:
        return None
    branches = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in by_first.items())
    return re.compile("|".join(branches))


def _marked(value: Any, guard: re.Pattern[str] | None, mark: str) -> Any:
    """`value` with the mark inside every token that its strings spell."""
    if guard is None:
        return value
    if isinstance(value, str):
        return guard.sub(lambda match: match[0] + mark, value)
    if isinstance(value, Mapping):
        return {
            _marked(key, guard, mark): _marked(item, guard, mark) for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_marked(item, guard, mark) for item in value]
    return value
