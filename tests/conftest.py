"""What tests of every package share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder in the cache (PLAIT_HOME, else the user's), made where missing."""
    from engine.pull import cache

    path = cache.default_model_path()
    if not cache.is_complete(path):
        from engine.pull.default_model import ensure_default_model

        ensure_default_model()
    return path
