"""The top-k's lines of PTX, which Triton's interpreter does not run, on numpy arrays."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kernels.gpu import kth
from kernels.gpu.topk import Tile, select
from tests.kernels.gpu.ptx import Ptx
from tests.kernels.gpu.test_topk import KINDS, by_sorting, draw

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the card runs them")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    ptx, builder = Ptx(), interpreter.InterpreterBuilder
    monkeypatch.setattr(kth, "_ON_CARD", tl.constexpr(True))
    monkeypatch.setattr(builder, "create_inline_asm", lambda _, *asm: ptx.run(*asm))
    monkeypatch.setattr(builder, "create_barrier", lambda _: ptx.barrier())


CUTS = [
    (Tile(1, 8, 64), 1024, 300),  # of one piece
    (Tile(2, 1, 64, programs=1), 1100, 60),  # five, of which one program keeps what is best
    (Tile(1, 2, 64, programs=8), 700, 100),  # three, each with a program
]


@pytest.mark.parametrize("kind, cut", list(zip(KINDS, 4 * CUTS, strict=True)))
def test_choices(kind: str, cut: tuple[Tile, int, int]) -> None:
    tile, width, k = cut
    scores = draw(kind, 2, width, CPU)
    counts = torch.tensor([width, width - 30])
    out = torch.full((2, k), 99, dtype=torch.int32)
    select(scores, counts, k, out, tile=tile)
    assert out.tolist() == [by_sorting(scores[0], k), by_sorting(scores[1, : width - 30], k)]


@pytest.mark.parametrize("k", [1, 2, 4095, 4096])
def test_as_many_warps_as_there_may_be(k: int) -> None:
    scores = draw("tied", 1, 2 * 4096 + 5, CPU)
    out = torch.full((1, k), 99, dtype=torch.int32)
    select(scores, torch.tensor([8197]), k, out, tile=Tile(1, 32, 64, programs=1))
    assert out.tolist() == [by_sorting(scores[0], k)]
