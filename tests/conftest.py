"""What tests of every package share."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

from tests.served import Served, serving

# Before torch is loaded: the models here are small, and threads that spin for more of it would only
# disturb the processes that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Triton decides while it is imported whether it compiles or interprets, and others import it too.
# Here it interprets, so that tests/kernels/gpu needs no GPU; in `make test-gpu`, which has no part
# in this file, and in processes that the tests start it does as always.
if importlib.util.find_spec("triton") is not None:
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        import triton.language

        triton.knobs.runtime.interpret = True

# How long an example takes is the machine's business.
settings.register_profile("plait", deadline=None)
settings.load_profile("plait")

collect_ignore = ["browser", "gpu"]  # make test-browser, make test-gpu


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands that run in this process configure logging; no later test should write there."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder in the cache (PLAIT_HOME, else the user's), made where missing."""
    from engine.pull import cache

    path = cache.default_model_path()
    if not cache.is_complete(path):
        from engine.pull.default_model import ensure_default_model

        ensure_default_model()
    return path


@pytest.fixture(scope="session")
def tiny_dsa(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3.2 of a few layers that has the default model's tokenizer."""
    from tests.tiny import save_dsa_chat

    return save_dsa_chat(tmp_path_factory.mktemp("models") / "tiny", default_model)


@pytest.fixture(scope="session")
def served(tiny_dsa: Path) -> Iterator[Served]:
    """A real server of `tiny_dsa` whose KV pool is too small for a crowd."""
    with serving(tiny_dsa, "--colocated", "--max-total-tokens", "1024") as running:
        running.wait_ready()
        yield running
        running.stop()
