"""The GPU's kernels against the torch forms: in Triton's interpreter on the CPU (tests/conftest.py
turns it on), compiled and on the device in `make test-gpu`, which runs these tests too."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    import triton

    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)
