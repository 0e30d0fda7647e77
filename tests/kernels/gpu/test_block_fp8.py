"""Products with weights in block fp8, and experts of them, against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels.block_fp8 import BlockFp8
from kernels.gpu import block_fp8, moe
from kernels.gpu.moe_tiles import Tile
from kernels.moe import moe_reference

DTYPES = [torch.float16]
if torch.cuda.is_available():  # Triton's interpreter multiplies no bfloat16
    DTYPES.append(torch.bfloat16)
# Beside the rounding of the answer; digits after the first
LIMITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-19}


def draw(*shape: int, device: torch.device) -> BlockFp8:
    """What is read past an edge would be seen: the last blocks have the largest scales."""
    w = BlockFp8.empty(*shape, device=device)
    w.codes.copy_(torch.randn(shape, device=device) * 30)
    w.scales.copy_(torch.rand(w.scales.shape, device=device) + 0.5)
    w.scales[..., -1] *= 4
    w.scales.mul_(shape[-1] ** -0.5 / 30)
    return w


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def poisoned(*shape, **options):  # type: ignore[no-untyped-def]
        out = plain(*shape, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(block_fp8.torch, "empty", poisoned)


# rows, columns, depth
SHAPES = [(1, 128, 128), (3, 200, 272), (17, 130, 528), (40, 64, 1040)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_few_rows(shape, dtype, splits, device, poison) -> None:
    rows, columns, depth = shape
    w = draw(columns, depth, device=device)
    x = torch.randn(rows, depth + 8, device=device).to(dtype)[:, :depth]
    tile = None if splits is None else block_fp8.Tile(16, 64, 4, 2, splits)
    want = x.double() @ w.to(torch.float64).t()
    assert error(block_fp8.linear(x, w, tile=tile), want) < LIMITS[dtype]
    h = torch.randn(rows, columns, device=device).to(dtype)
    added = block_fp8.linear(x, w, h.clone(), tile=tile)
    assert error(added, want + h.double()) < LIMITS[dtype]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("offset", [0, 4])
def test_rows_that_no_descriptor_takes(rows, offset, device) -> None:
    """Their stride, or where they begin, is no multiple of 16 bytes."""
    w = draw(64, 144, device=device)
    x = torch.randn(rows, 144 + 4, device=device).half()[:, offset : offset + 144]
    want = x.double() @ w.to(torch.float64).t()
    assert error(block_fp8.linear(x, w), want) < LIMITS[torch.float16]


def test_no_rows(device) -> None:
    w, x = draw(130, 128, device=device), torch.empty(0, 128, device=device).half()
    assert block_fp8.linear(x, w).shape == (0, 130)


@pytest.mark.parametrize("columns, depth", [(300, 144), (128, 256)])
def test_many_rows(columns, depth, device, monkeypatch, poison) -> None:
    """Slice by slice, with the weights rounded once."""
    monkeypatch.setattr(block_fp8, "_SLICE_ELEMENTS", 128 * depth)
    w = draw(columns, depth, device=device)
    x = torch.randn(300, depth, device=device).half()
    want = x.double() @ w.to(torch.float16).double().t()
    assert error(block_fp8.linear(x, w), want) < LIMITS[torch.float16]
    h = torch.randn(300, columns, device=device).half()
    added = block_fp8.linear(x, w, h.clone())
    assert error(added, want + h.double()) < LIMITS[torch.float16]


@pytest.mark.parametrize("columns, depth", [(300, 144), (1, 130)])
def test_dequantised(columns, depth, device) -> None:
    w = draw(columns, depth, device=device)
    out = torch.full((columns + 1, depth), torch.nan, device=device)
    got = block_fp8.dequantise(w, out)
    assert torch.equal(got, w.to(torch.float32)) and bool(out[columns:].isnan().all())


@pytest.mark.parametrize("num_columns, begins", [(128, [0]), (512, [0]), (1152, [0, 512, 1024])])
@pytest.mark.parametrize("halves", [1, 2])
def test_widened_by_parts(num_columns, begins, halves, device, monkeypatch, poison) -> None:
    """A part's columns are the same ones of each expert and half."""
    monkeypatch.setattr(block_fp8, "_PART_ELEMENTS", 3 * halves * 512 * 144)
    w = draw(3, halves * num_columns, 144, device=device)
    want = w.to(torch.float16).view(3, halves, num_columns, 144)
    found = []
    for begin, part in block_fp8.widened(w, halves, torch.float16, 256):
        own = want[:, :, begin : begin + 512]
        assert torch.equal(part, own.reshape(3, -1, 144))
        found.append(begin)
    assert found == begins


@pytest.mark.parametrize("num_rows", [1, 16, 40, 128, 256])
@pytest.mark.parametrize("columns, num_blocks", [(2240, 56), (24576, 12), (7168, 128), (64, 1)])
def test_every_split_has_blocks(num_rows, columns, num_blocks, device) -> None:
    tile = block_fp8.tile_of(num_rows, columns, num_blocks, device)
    each = -(-num_blocks // tile.splits)
    assert (tile.splits - 1) * each < num_blocks


TILES = {
    "exact": Tile(16, 64, 128, 4, 2, True),
    "exact, halves of blocks": Tile(16, 64, 64, 4, 2, True),
    "rounded": Tile(16, 64, 64, 4, 2, True, True),
    "rows first": Tile(16, 64, 64, 4, 2, False),
    "rounded, rows first": Tile(16, 64, 64, 4, 2, False, True),
    "widened": Tile(16, 64, 64, 4, 2, False, widens=True),
    "widened, columns past the last": Tile(16, 256, 64, 4, 2, True, widens=True),
}


CASES = [*product(DTYPES, TILES.values()), (torch.float32, None)]


@pytest.mark.parametrize("dtype, tile", CASES, ids=str)
@pytest.mark.parametrize("hidden, inner", [(256, 128), (144, 256), (128, 384)])
def test_experts(dtype, tile, hidden, inner, device, monkeypatch, poison) -> None:
    monkeypatch.setattr(block_fp8, "_PART_ELEMENTS", 1)  # parts of as few columns as there can be
    tokens, experts, top_k = 9, 3, 2
    w13 = draw(experts, 2 * inner, hidden, device=device)
    # Experts' rows that end within a block are dequantised on loading.
    w2 = draw(experts, hidden, inner, device=device)
    down = w2 if hidden % 128 == 0 else w2.to(dtype)
    x = torch.randn(tokens, hidden + 8, device=device)[:, :hidden].to(dtype)
    ids = torch.randint(0, experts - 1, (tokens, top_k), device=device)  # one has no token
    ids[0, 0] = 0
    weights = torch.rand(tokens, top_k, device=device)
    h, shared = (torch.randn(tokens, hidden, device=device).to(dtype) for _ in range(2))
    wide = w13.to(torch.float64), w2.to(torch.float64)
    exact = moe_reference(x.double(), *wide, ids, weights.double())

    tiles = None if tile is None else (tile, tile)
    got = torch.full_like(h, torch.nan)
    moe.add_moe_(got, x, w13, down, ids, weights, None, adds=False, tiles=tiles)
    assert error(got, exact) < 4 * LIMITS[dtype]

    want = exact + h.double() + shared.double()
    moe.add_moe_(h, x, w13, down, ids, weights, shared)
    assert error(h, want) < 4 * LIMITS[dtype]
