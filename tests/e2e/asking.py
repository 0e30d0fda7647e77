"""Requests of every kind to a running server, all at once or one at a time, and what they say."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.served import FrontEnd, Served

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SUBJECTS = ("rivers", "the moon", "bread", "old trains", "numbers")
PREAMBLE = "You answer questions about nature, history and everyday life in plain words. " * 6
LONG_ANSWERS = (300, 130, 120, 130, 120, 135)
NUM_LONG = len(LONG_ANSWERS)
NUM_PAGE_TOKENS = 64


@dataclass
class Choice:
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """`error` is the message of an error answer or an error event."""

    choices: list[Choice]
    error: str = ""


@dataclass(frozen=True)
class Ask:
    route: str
    body: dict[str, Any]

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))


def mixed_asks(num: int, seed: int) -> list[Ask]:
    """Different requests: both routes, streamed and not, greedy and seeded, some with n = 2, stop
    strings, penalties or logprobs, answers of 1 to 300 tokens, long prefixes in common. The first
    NUM_LONG are those with long answers, which start first: together they need more pages in the
    end than there are."""
    draw = random.Random(seed)
    return [_mixed_ask(number, draw) for number in range(num)]


def _mixed_ask(number: int, draw: random.Random) -> Ask:
    question = f"What do you know about {draw.choice(SUBJECTS)}? Say {number} things."
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": LONG_ANSWERS[number] if number < NUM_LONG else round(40 ** draw.random()),
        "priority": int(number < NUM_LONG),
        "stream": draw.random() < 0.5,
        "ignore_eos": draw.random() < 0.5,
    }
    if draw.random() < 0.5:
        body["temperature"] = 0
    else:
        body |= {"seed": draw.randrange(1 << 40), "temperature": draw.choice((0.3, 1.0))}
        body |= {"top_p": draw.choice((0.8, 1.0)), "top_k": draw.choice((0, 20))}
    is_chat = draw.random() < 0.6
    if draw.random() < 0.3:
        body["logprobs"] = True if is_chat else 0
    if number >= NUM_LONG and draw.random() < 0.2:
        body["n"] = 2
    if number >= NUM_LONG and draw.random() < 0.2:
        body["stop"] = draw.choice((["e"], ["on", " the"], ["zq", "ing"]))
    if draw.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2}
    return ask_of(question, is_chat, draw.random() < 0.5, body)


def ask_of(question: str, is_chat: bool, with_preamble: bool, body: dict[str, Any]) -> Ask:
    if not is_chat:
        prompt = (PREAMBLE if with_preamble else "") + question
        return Ask(COMPLETIONS, {"prompt": prompt, **body})
    messages = [{"role": "user", "content": question}]
    if with_preamble:
        messages.insert(0, {"role": "system", "content": PREAMBLE})
    return Ask(CHAT, {"messages": messages, **body})


def client_of(served: FrontEnd) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits, trust_env=False)


async def tell(
    http: httpx.AsyncClient, ask: Ask, on_chunk: Callable[[], None] = lambda: None
) -> Answer:
    """The whole answer; `on_chunk` is called at each chunk of a stream."""
    answer = Answer([Choice() for _ in range(ask.num_choices)])
    if ask.body.get("stream"):
        async for value in chunks(http, ask):
            _fold(answer, value)
            on_chunk()
    else:
        _fold(answer, (await http.post(ask.route, json=ask.body)).json())
    return answer


async def chunks(http: httpx.AsyncClient, ask: Ask) -> AsyncIterator[Any]:
    """The values of a stream, which must end with [DONE]."""
    async with http.stream("POST", ask.route, json=ask.body) as response:
        line = ""
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))
            elif line.startswith("{"):  # an error before the stream began
                yield json.loads(line)
                return
            elif line.startswith("data: [DONE]"):
                return
        raise AssertionError(f"the stream ended with {line!r}")


def _fold(answer: Answer, value: Any) -> None:
    if "error" in value:
        answer.error = value["error"]["message"]
        return
    for part in value["choices"]:
        choice = answer.choices[part["index"]]
        shown = part.get("message") or part.get("delta") or {}
        choice.text += part.get("text") or shown.get("content") or ""
        logprobs = part.get("logprobs") or {}
        choice.tokens += [entry["token"] for entry in logprobs.get("content") or []]
        choice.tokens += logprobs.get("tokens") or []
        if part["finish_reason"] is not None:
            assert choice.finish_reason is None, "two ends of one choice"
            choice.finish_reason = part["finish_reason"]


async def tell_one_at_a_time(served: FrontEnd, asks: Sequence[Ask]) -> list[Answer]:
    async with client_of(served) as http:
        return [await tell(http, ask) for ask in asks]


async def tell_together(served: Served, asks: Sequence[Ask]) -> list[Answer]:
    async with client_of(served) as http:
        return await asyncio.gather(*(tell(http, ask) for ask in asks))


def assert_all_given_back(served: Served) -> None:
    """Waits until the server says that it has nothing to do: then all its pages are free, or hold
    prefixes that may be evicted."""

    seen = served.metrics()

    def is_idle() -> bool:
        nonlocal seen
        seen = served.metrics()
        busy = seen("plait_requests_running") + seen("plait_requests_waiting")
        return seen("plait_workers_ready") == 1 and busy == 0

    served.until(is_idle)
    pages = {
        state: seen("plait_pool_pages", f'state="{state}"')
        for state in ("free", "evictable", "locked", "held")
    }
    assert pages["locked"] == pages["held"] == 0, pages
    total = seen("plait_pool_tokens", 'kind="logical"') / NUM_PAGE_TOKENS
    assert pages["free"] + pages["evictable"] == total, pages
