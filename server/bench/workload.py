"""What is sent: prompts of real text with known lengths, and their arrival times.

The text is Python's own language reference, which every Python ships. Lengths are measured by the
server's /tokenize; a server without one gets an estimate of four characters a token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import httpx

from server.bench.options import BenchOptions, Span

CHARS_PER_TOKEN = 4
MOST_CHARS = 20_000_000  # of one /tokenize call: under the usual limit on a body's size


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send. `arrival_s` counts from the start of the run."""

    prompt: str
    output_tokens: int
    arrival_s: float = 0.0


def corpus() -> str:
    """English text of some 700,000 characters, the same on one Python version."""
    from pydoc_data.topics import topics

    return "\n\n".join(text.strip() for _, text in sorted(topics.items()))


class TextCutter:
    """Cuts texts of a wanted number of tokens out of the corpus."""

    def __init__(self, http: httpx.AsyncClient, model: str, text: str) -> None:
        self._http = http
        self._model = model
        self._text = text
        self.is_exact = True  # False once the server turned out to have no /tokenize

    async def cut(self, start: int, num_tokens: int) -> str:
        """Text from character `start` on, of `num_tokens` tokens where the server can tell."""
        if num_tokens == 0:
            return ""
        num_chars = num_tokens * CHARS_PER_TOKEN
        while self.is_exact:
            num_chars *= 3  # until there is text enough
            piece = self._slice(start, num_chars)
            tokens = await self._post("/tokenize", {"prompt": piece}, "tokens")
            if isinstance(tokens, list) and len(tokens) < num_tokens and num_chars < MOST_CHARS:
                continue
            if isinstance(tokens, list):
                cut: dict[str, object] = {"tokens": tokens[:num_tokens]}
                text = await self._post("/detokenize", cut, "prompt")
                if isinstance(text, str):
                    return text
            self.is_exact = False
        return self._slice(start, num_tokens * CHARS_PER_TOKEN)

    def _slice(self, start: int, num_chars: int) -> str:
        text = self._text
        repeats = (start + num_chars) // len(text) + 1
        return (text * repeats)[start : start + num_chars]

    async def _post(self, path: str, body: dict[str, object], key: str) -> object:
        extra = {"model": self._model, "add_special_tokens": False}
        answer = await self._http.post(path, json=body | extra)
        if answer.status_code != 200:
            return None
        try:
            content = answer.json()
        except ValueError:
            return None
        return content.get(key) if isinstance(content, dict) else None


async def make_jobs(options: BenchOptions, cutter: TextCutter, text: str) -> list[Job]:
    """Warm-up jobs first, then the measured ones; equal for equal seeds, text and server."""
    draw = random.Random(options.seed)
    prefix = await cutter.cut(draw.randrange(len(text)), options.shared_prefix_tokens)
    jobs = []
    arrival_s = 0.0
    for index in range(options.num_warmup + options.num_requests):
        length = _draw(draw, options.prompt_tokens)
        output_tokens = _draw(draw, options.output_tokens)
        start = draw.randrange(len(text))
        shares = bool(prefix) and draw.random() < options.shared_prefix_share
        gap_s = draw.expovariate(options.request_rate) if options.request_rate else 0.0
        # The first measured request arrives at once: the clock starts with it.
        arrival_s = arrival_s + gap_s if index > options.num_warmup else 0.0
        own = await cutter.cut(start, length - (options.shared_prefix_tokens if shares else 0))
        jobs.append(Job(prefix + own if shares else own, output_tokens, arrival_s))
    return jobs


def _draw(draw: random.Random, span: Span) -> int:
    return draw.randint(span.low, span.high)
