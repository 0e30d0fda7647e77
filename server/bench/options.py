"""The options of `plait bench`: what is sent, how fast, and where the numbers go."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.options.config import ConfigError

ENDPOINTS = ("completions", "chat")


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from `low` to `high`, both included, drawn evenly."""

    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None  # None: the first of /v1/models
    api_key: str | None = None
    endpoint: str = "completions"  # or chat, where the template's tokens come on top
    concurrency: int | None = None  # requests in flight, at most; None: 1, unless a rate is given
    request_rate: float | None = None  # arrivals a second (Poisson); None: as fast as allowed
    num_requests: int = 32
    num_warmup: int = 2
    prompt_tokens: Span = Span(256, 256)
    output_tokens: Span = Span(64, 64)
    shared_prefix_tokens: int = 0  # of prompt_tokens, equal in every request that shares
    shared_prefix_share: float = 1.0  # of the requests
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    timeout_s: float = 600.0
    json_path: Path | None = None
    plot_path: Path | None = None

    def __post_init__(self) -> None:
        if self.concurrency is None and self.request_rate is None:
            object.__setattr__(self, "concurrency", 1)
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ConfigError(f"{_flag(name)} {value}: expected {low} or more")
        if self.request_rate is not None and not 0 < self.request_rate < float("inf"):
            raise ConfigError(f"--request-rate {self.request_rate}: expected more than 0")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {self.base_url}: expected http://… or https://…")
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"--endpoint {self.endpoint}: expected one of {', '.join(ENDPOINTS)}")
        if not 0 <= self.shared_prefix_share <= 1:
            raise ConfigError(f"--shared-prefix-share {self.shared_prefix_share}: expected 0 to 1")
        if self.shared_prefix_tokens >= self.prompt_tokens.low:
            raise ConfigError(
                f"--shared-prefix-tokens {self.shared_prefix_tokens}: expected fewer than"
                f" --prompt-tokens' {self.prompt_tokens.low}"
            )


_LOWEST = {
    "concurrency": 1,
    "num_requests": 1,
    "num_warmup": 0,
    "shared_prefix_tokens": 0,
    "temperature": 0,
    "timeout_s": 0.001,
}
_HELP = {
    "base_url": "server's address, with or without /v1",
    "model": "model to name in requests (default: the first of /v1/models)",
    "api_key": "key to send (also OPENAI_API_KEY)",
    "endpoint": "completions or chat",
    "concurrency": "requests in flight, at most (default: 1, or no limit with --request-rate)",
    "request_rate": "arrivals a second, at random times (Poisson)",
    "num_requests": "requests that are measured",
    "num_warmup": "requests sent before, not measured",
    "prompt_tokens": "length of a prompt: N, or LOW:HIGH",
    "output_tokens": "tokens to generate, at most: N, or LOW:HIGH",
    "shared_prefix_tokens": "first tokens of a prompt that are the same in all that share",
    "shared_prefix_share": "share of the requests with that prefix, 0 to 1",
    "temperature": "0 is greedy",
    "ignore_eos": "generate to the limit (an extension that plait and vLLM know)",
    "seed": "of prompts, lengths and arrivals",
    "timeout_s": "seconds without a byte after which a request counts as failed",
    "json_path": "write summary and every request's times here",
    "plot_path": "write distributions and the token timeline here",
}
_FLAGS = {"json_path": "--json", "plot_path": "--plot", "num_warmup": "--warmup"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of BenchOptions."""
    for field in dataclasses.fields(BenchOptions):
        kwargs: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        text = _HELP[field.name]
        if field.name == "ignore_eos":
            parser.add_argument(_flag(field.name), action="store_true", help=text, **kwargs)
            continue
        default = field.default
        if isinstance(default, Span):
            default = default.low
        if default is not None:
            text = f"{text} (default: {default})"
        metavar = "FILE" if field.name.endswith("_path") else field.name.rsplit("_", 1)[-1].upper()
        parser.add_argument(_flag(field.name), metavar=metavar, help=text, **kwargs)


def from_args(args: Mapping[str, Any]) -> BenchOptions:
    """The options from parsed flags (only those given). Raises ConfigError for a bad value."""
    kinds = {f.name: str(f.type).removesuffix(" | None") for f in dataclasses.fields(BenchOptions)}
    values: dict[str, Any] = {name: _parse(name, kinds[name], text) for name, text in args.items()}
    if "api_key" not in values and (key := os.environ.get("OPENAI_API_KEY")):
        values["api_key"] = key
    return BenchOptions(**values)


def _parse(name: str, kind: str, text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        if kind == "Span":
            return _parse_span(text)
        return {"int": int, "float": float, "Path": Path}.get(kind, str)(text)
    except ValueError:
        nouns = {"Span": "N or LOW:HIGH, 1 or more", "int": "a whole number", "float": "a number"}
        raise ConfigError(f"{_flag(name)} {text}: expected {nouns[kind]}") from None


def _parse_span(text: str) -> Span:
    low, _, high = text.partition(":")
    span = Span(int(low), int(high or low))
    if not 1 <= span.low <= span.high:
        raise ValueError(text)
    return span


def _flag(name: str) -> str:
    return _FLAGS.get(name, "--" + name.replace("_", "-"))
