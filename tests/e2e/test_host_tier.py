"""`plait serve --enable-hierarchical-cache`: a conversation that the KV pools have no room for any
more comes back from host memory, on both sides of the hand-off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import COMPLETIONS, PREAMBLE
from tests.served import Served, serving

pytestmark = pytest.mark.e2e

NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def tiered(tiny_dsa: Path) -> Iterator[Served]:
    """16 pages on the two prefill ranks, 8 on the decode worker; 4 times as many in host memory."""
    flags = ["--prefill-cp-size", "2", "--prefill-max-total-tokens", "512"]
    flags += ["--decode-max-total-tokens", "512", "--enable-hierarchical-cache"]
    with serving(tiny_dsa, *flags, "--hicache-ratio", "4") as running:
        running.wait_ready()
        yield running
        running.stop()


def answer(served: Served, number: int) -> tuple[str, dict[str, Any]]:
    """Text, and how many of the prompt's tokens were cached."""
    body = {"model": "tiny", "prompt": f"{number}. {PREAMBLE * 3}", "max_tokens": 8}
    body |= {"temperature": 0, "ignore_eos": True}
    found: Any = httpx.post(f"{served.url}{COMPLETIONS}", json=body, timeout=300).json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]


def test_what_was_evicted_is_answered_from_host_memory(tiered: Served) -> None:
    cold = [answer(tiered, number) for number in range(NUM_PROMPTS)]
    assert [details["cached_tokens"] for _, details in cold] == [0] * NUM_PROMPTS
    again = [answer(tiered, number) for number in range(NUM_PROMPTS)]
    assert [text for text, _ in again] == [text for text, _ in cold]
    for _, details in again:
        by_tier = details["cached_tokens_by_tier"]
        assert details["cached_tokens"] == by_tier["device"] + by_tier["host"] >= 64
    assert sum(details["cached_tokens_by_tier"]["host"] for _, details in again) >= 64
    for role in ("prefill", "decode"):
        label = f'role="{role}"'
        tiered.until(lambda label=label: tiered.metrics()("plait_host_hit_tokens_total", label) > 0)
        assert tiered.metrics()("plait_evicted_pages_total", label) > 0
    pages = {w["role"]: w["pages"] for w in httpx.get(f"{tiered.url}/status").json()["workers"]}
    assert pages["prefill"]["host"]["total"] == 64
    assert pages["decode"]["host"]["total"] == 32
    assert pages["decode"]["host"]["cached"] > 8
