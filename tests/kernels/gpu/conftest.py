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


@pytest.fixture(autouse=True)
def bounds_of_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter keeps scalars in arrays of one element, which numpy from 2.4 on
    refuses to take for the bounds of a range."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
