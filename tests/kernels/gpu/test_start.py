"""How many forms of the kernels a start compiles, and that it can compile them ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

MODELS = ["dsv32-5l", "dsv32-5l-fp8", "default-small", "llama-1b"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache = str(tmp_path_factory.mktemp("triton"))
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.start", cache, *MODELS],
        env=os.environ | {"TRITON_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(found.stdout)


@pytest.mark.parametrize("model", MODELS)
def test_batch_sizes_do_not_multiply_the_forms_of_kernels(start: Any, model: str) -> None:
    """15 sizes, with and without selection. What remains are a layer's own different calls, and
    tiles for few queries and for many; of a product, three heights, with K split or not."""
    numbers = start["forms"][model]["numbers"]
    assert {"_rms_norm", "_rope", "_store"} <= numbers.keys()
    most = {"_linear": 6}
    assert {kernel: n for kernel, n in numbers.items() if n > most.get(kernel, 4)} == {}


@pytest.mark.parametrize("steps", ["decodes", "prefills"])
@pytest.mark.parametrize("model", MODELS)
def test_the_steps_compiled_ahead_meet_every_form(start: Any, model: str, steps: str) -> None:
    assert start["forms"][model]["missed"][steps] == []


def test_kernels_compile_without_being_run(start: Any) -> None:
    names = ["_choose", "_keep", "_linear", "_silu_mul", "attend"]
    assert start["ahead"]["compiled"] == [f"{name}.cubin" for name in names]
    assert start["ahead"]["zeros"]


def test_a_kernel_that_does_not_compile_raises_where_it_is_called(start: Any) -> None:
    assert "refused" in start["ahead"]["raised"]
