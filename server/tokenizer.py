"""The model's tokenizer and chat template, read from its folder; no torch, no remote code.

Owns a small thread pool: the event loop never tokenizes. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import tokenizers

from server.chat_template import ChatTemplate, TemplateError
from server.detokenizer import TokenBytes

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 2
# What generation_config.json may recommend: the least and the largest value that requests may send.
_RECOMMENDED = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class TokenizerError(ValueError):
    """The model's folder holds no tokenizer that can be served; the message says what is wrong."""


class Tokenizer:
    """Text to ids and back. Methods may be called from any thread; from the event loop use `run`.

    `eos_token_ids` end an answer: those of generation_config.json, else of config.json, and the
    tokenizer's own. `chat_template` is None where the model has none. `sampling_defaults` are what
    the model's authors recommend (generation_config.json), for requests that do not say.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        sampling_defaults: Mapping[str, float] | None = None,
    ) -> None:
        self._backend = backend
        self.sampling_defaults = dict(sampling_defaults or {})
        # A second one: the switch is a property of the whole object, not of a call.
        self._literal = tokenizers.Tokenizer.from_str(backend.to_str())
        self._literal.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        special_ids = [token_id for token_id, token in added.items() if token.special]
        named = dict(special_tokens or {})
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        layout = json.loads(backend.to_str())
        self.has_normalizer = layout.get("normalizer") is not None
        self.token_bytes = TokenBytes(
            backend.get_vocab(with_added_tokens=True),
            special_ids,
            layout.get("decoder") or {"type": "Fuse"},
        )
        self.chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self.chat_template = ChatTemplate(
                chat_template,
                named,
                [token.content for token in added.values() if token.special],
                [token.content for token in added.values() if not token.special],
            )
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, tokenizer_config.json,
        special_tokens_map.json, chat_template.jinja, generation_config.json and config.json.

        Raises TokenizerError.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json; save one there with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        # The library raises bare Exception for a file that it cannot parse.
        except Exception as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        _add_listed_tokens(backend, config)
        named = _named_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
        try:
            return cls(
                backend,
                chat_template=_find_template(folder, config),
                special_tokens=named,
                eos_token_ids=_find_eos(folder, backend, named),
                sampling_defaults=_find_defaults(folder),
            )
        except (TemplateError, ValueError) as error:
            raise TokenizerError(f"{folder}: {error}") from error

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work` in the pool, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*args, **kwargs))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids. `add_special_tokens` adds what the tokenizer puts around a text (BOS);
        without `parse_special` text that spells a special token stays text."""
        backend = self._backend if parse_special else self._literal
        # The batch call, for it lets other threads run.
        encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids that transformers' apply_chat_template gives, except that no text of a message
        becomes a special token. Raises TemplateError."""
        if self.chat_template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        pieces = self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        ids: list[int] = []
        for encoding in self._backend.encode_batch_fast(pieces, add_special_tokens=False):
            ids += encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.token_bytes.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def _content(token: object) -> str | None:
    """A token as the files write it: a string, or an object with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    contents = {name: _content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: content for name, content in contents.items() if content is not None}


def _add_listed_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """tokenizer_config.json may list added tokens that tokenizer.json lacks."""
    known = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder") or {}
    for token_id, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if int(token_id) in known:
            continue
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        added = tokenizers.AddedToken(
            token["content"], **{flag: token[flag] for flag in flags if flag in token}
        )
        if token.get("special"):
            backend.add_special_tokens([added])
        else:
            backend.add_tokens([added])


def _find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _find_eos(folder: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> list[int]:
    found: object = _read_json(folder / "generation_config.json").get("eos_token_id")
    if found is None:
        found = _read_json(folder / "config.json").get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    eos = named.get("eos_token")
    if eos is not None:
        ids = [*ids, backend.token_to_id(eos)]
    return [token_id for token_id in ids if isinstance(token_id, int)]


def _find_defaults(folder: Path) -> dict[str, float]:
    """The recommended sampling, where the model is meant to be sampled. Raises TokenizerError."""
    path = folder / "generation_config.json"
    config = _read_json(path)
    if not config.get("do_sample"):
        return {}
    found = {name: config[name] for name in _RECOMMENDED if config.get(name) is not None}
    for name, value in found.items():
        least, largest = _RECOMMENDED[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= largest:
            raise TokenizerError(f"{path}: {name} is {value!r}; expected {least} to {largest}")
    return found
