"""A server for the tests of facts that hold whatever the model says."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import openai
import pytest

from server.options.option import ENV_PREFIX
from tests.server.scripted import ANSWER, MODEL_NAME, Server, reply, serving


@pytest.fixture
def no_variables_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def scripted() -> Iterator[Server]:
    """One worker that says ANSWER, then EOS, over and over."""
    with serving() as server:
        tokenizer = server.tokenizer
        server.add_worker(reply(tokenizer.encode(ANSWER) + list(tokenizer.eos_token_ids)))
        yield server


KINDS = ("scripted", "real")
GIVEN_URL = os.environ.get("PLAIT_TEST_BASE_URL")  # another server, whose answers may be any text


@pytest.fixture(scope="session", params=["given"] if GIVEN_URL else KINDS)
def base_url(request: pytest.FixtureRequest) -> str:
    """Scripted workers behind a front end in this process; `plait serve` with a real worker."""
    if request.param == "given":
        return str(GIVEN_URL)
    if request.param == "real":
        return str(request.getfixturevalue("served").url)
    return str(request.getfixturevalue("scripted").base_url)


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ.get("PLAIT_TEST_MODEL") or MODEL_NAME


@pytest.fixture(scope="session")
def sdk(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=60) as client:
        yield client
