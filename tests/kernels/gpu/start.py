"""What a start compiles, found without a card: run by test_start.py in a process of its own, where
Triton compiles instead of interpreting. Prints a JSON object."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from benchmarks.random_models import build_config
from engine.attention.local import local_attention
from engine.batch import ForwardBatch
from engine.decode_graphs import batch_sizes
from engine.device_memory import Step, steps_ahead
from engine.model.deepseek import DeepseekModel
from engine.model.llama import LlamaModel
from kernels.block_fp8 import BlockFp8, Weight
from kernels.gpu import attention, block_fp8, index_topk, mla_hopper, moe, norm, rope, route, store  # noqa: F401
from kernels.gpu.ahead import compiling
from kernels.gpu.card import Card
from kernels.gpu.swiglu import silu_mul
from kernels.gpu.topk import Tile, select
from kvcache.pool import KVPool

HOPPER = Card(num_processors=132, capability=9, shared_bytes=232448, multiplies_fp8=True)
META = torch.device("meta")
MOST, PAGE, CONTEXT, CHUNK = 128, 64, 65536, 8192


class Driver:
    """Of a card that is not there: enough to compile for it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Shapes:
    """Weights of any name that have no memory."""

    device, dtype, held_bytes = META, torch.bfloat16, 0

    def __init__(self, keeps_fp8: bool) -> None:
        self.keeps_fp8 = keeps_fp8

    def has(self, name: str) -> bool:
        return not (self.keeps_fp8 and name.endswith(".experts.gate_up_proj"))

    def get(self, name: str, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype or self.dtype, device=META)

    def fused(self, parts: list[tuple[str, int]], *inner: int) -> torch.Tensor:
        return torch.cat([self.get(name, (rows, *inner)) for name, rows in parts])

    def weight(self, parts: list[tuple[str, int]], columns: int) -> Weight:
        rows = sum(rows for _, rows in parts)
        if self.keeps_fp8:
            return BlockFp8.empty(rows, columns, device=META)
        return torch.empty(rows, columns, dtype=self.dtype, device=META)


@contextlib.contextmanager
def on_hopper() -> Iterator[None]:
    """Shapes are taken for tensors on a card."""
    stand_ins = {
        "gpu_kernels": lambda *tensors: True,
        "keeps_block_fp8": lambda device: True,
        "card_of": lambda device: HOPPER,
    }
    with contextlib.ExitStack() as patches:
        ours = [m for name, m in sys.modules.items() if name[:7] in ("engine.", "kernels")]
        for module in ours:
            for name in stand_ins.keys() & vars(module).keys():
                patches.enter_context(mock.patch.object(module, name, stand_ins[name]))
        yield


def forms_of(name: str, steps: Iterable[Step]) -> dict[str, set[str]]:
    """By kernel, of these steps of a model."""
    forms: dict[str, set[str]] = defaultdict(set)

    def note(*, key: str, fn: Any, **rest: Any) -> bool:
        forms[fn.name].add(key)
        return True  # do not compile it, nor launch it

    config = build_config(name, CONTEXT, num_hidden_layers=2)
    kind = DeepseekModel if config.model_type == "deepseek_v32" else LlamaModel
    with on_hopper(), mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note):
        keeps_fp8 = getattr(config, "quantization_config", None) is not None
        model: Any = kind.load(config, Shapes(keeps_fp8))
        pool = KVPool.create(model.geometry, PAGE, 8, torch.bfloat16, META)
        for starts, length in steps:
            ids = torch.zeros(len(starts) * length, dtype=torch.int64, device=META)
            pages = torch.zeros((len(starts), CONTEXT // PAGE), dtype=torch.int32, device=META)
            batch = ForwardBatch(ids, ids, ids, pages, starts, (length,) * len(starts))
            model.forward(ids, ids, local_attention(pool).begin(batch))
    return forms


@triton.jit
def refused(x):
    tl.static_assert(False, "refused")


def ahead(cache: Path) -> dict[str, Any]:
    """How kernels that compile, one of them Hopper's own, two with lines of PTX, and one that does
    not fare."""
    x = torch.ones(3, 64)
    rows = torch.zeros(3, 576, dtype=torch.bfloat16)
    weights = BlockFp8.empty(64, 576, device=rows.device)
    index, counts = torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    scores = torch.zeros(1, 16384)
    with compiling():
        out = silu_mul(x)
        block_fp8.linear(rows, weights, tile=block_fp8.Tile(16, 64, 4, 3, splits=1))
        mla_hopper.mla_latents(rows[None], rows, index, counts, 0, 1.0, HOPPER.num_processors)
        select(scores, counts, 3, index, tile=Tile(2, 4, 64))
        refused[(1,)](x)
    raised = ""
    try:
        refused[(1,)](x)
    except Exception as error:
        raised = str(error)
    return {
        "compiled": sorted(path.name for path in cache.rglob("*.cubin")),
        "zeros": not out.any(),
        "raised": raised,
    }


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    decodes = [((start,) * n, 1) for n in batch_sizes(MOST) for start in (0, CONTEXT - 1)]
    lengths = (3, 100, 600, 3000)
    prefills = [((start,), n) for n in lengths for start in (0, CONTEXT // 3, CONTEXT - n)]
    found: dict[str, Any] = {"ahead": ahead(Path(sys.argv[1])), "forms": {}}
    for name in sys.argv[2:]:
        decoding, prefilling = forms_of(name, decodes), forms_of(name, prefills)
        selects = name != "llama-1b"
        met = forms_of(name, steps_ahead(CONTEXT, CHUNK, MOST, selects))
        found["forms"][name] = {
            "numbers": {kernel: len(keys) for kernel, keys in decoding.items()},
            "missed": {
                "decodes": sorted(k for k, keys in decoding.items() if keys - met[k]),
                "prefills": sorted(k for k, keys in prefilling.items() if keys - met[k]),
            },
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
