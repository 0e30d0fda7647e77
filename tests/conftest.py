"""What tests of every package share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is loaded: the models here are small, and threads that spin for more of it would only
# disturb the processes that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder in the cache (PLAIT_HOME, else the user's), made where missing."""
    from engine.pull import cache

    path = cache.default_model_path()
    if not cache.is_complete(path):
        from engine.pull.default_model import ensure_default_model

        ensure_default_model()
    return path
