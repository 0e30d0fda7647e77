"""One streamed request and when each piece of its answer came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import msgspec

from server.bench.options import BenchOptions
from server.bench.workload import Job


@dataclass(slots=True)
class RequestResult:
    """Times are seconds from the start of the run; `chunk_times_s` one a piece of text."""

    start_s: float
    end_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # short and bounded: it is counted by value

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times_s[0] - self.start_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds an output token after the first."""
        if not self.chunk_times_s or self.output_tokens < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def body_of(job: Job, options: BenchOptions, model: str) -> dict[str, object]:
    """The JSON body that asks for `job`."""
    body: dict[str, object] = {
        "model": model,
        "max_tokens": job.output_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": job.prompt}]
    else:
        body["prompt"] = job.prompt
    return body


async def send(
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, object],
    origin_s: float,
    on_chunk: Callable[[], None] = lambda: None,
) -> RequestResult:
    """Stream one answer. A failure is a result with `error`, never an exception.

    `origin_s` is the perf_counter reading that times count from.
    """
    result = RequestResult(time.perf_counter() - origin_s)
    try:
        async with http.stream("POST", path, json=body) as answer:
            if answer.status_code == 200:
                await _read(answer, result, origin_s, on_chunk)
            else:
                result.error = f"HTTP {answer.status_code}"
    except httpx.HTTPError as error:
        result.error = type(error).__name__
    except msgspec.MsgspecError:
        result.error = "malformed chunk"
    result.end_s = time.perf_counter() - origin_s
    return result


async def _read(
    answer: httpx.Response, result: RequestResult, origin_s: float, on_chunk: Callable[[], None]
) -> None:
    is_done = False
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            is_done = True
            continue
        chunk = _decode(data.encode())
        if chunk.error is not None:
            result.error = f"stream error {chunk.error.code or chunk.error.type}"
            continue
        if _note(chunk, result, time.perf_counter() - origin_s):
            on_chunk()
    if result.error is None and not (is_done and result.finish_reason):
        result.error = "stream cut short"


def _note(chunk: _Chunk, result: RequestResult, now_s: float) -> bool:
    """Fold one chunk in; True where it carried text."""
    if chunk.usage is not None:
        result.prompt_tokens = chunk.usage.prompt_tokens
        result.output_tokens = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        result.cached_tokens = (details.cached_tokens or 0) if details else 0
    has_text = False
    for choice in chunk.choices:
        text = choice.text if choice.delta is None else choice.delta.content
        has_text |= bool(text)
        result.finish_reason = choice.finish_reason or result.finish_reason
    # An answer without any text still has a first token: the one that ended it.
    if has_text or (result.finish_reason and not result.chunk_times_s):
        result.chunk_times_s.append(now_s)
    return has_text
