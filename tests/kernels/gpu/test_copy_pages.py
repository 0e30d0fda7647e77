"""The kernel that copies pages, of any shape and cut in any way, against the torch form."""

from __future__ import annotations

import pytest
import torch

from kernels.copy_pages import copy_pages as on_cpu
from kernels.gpu.copy_pages import SHAPE, Shape, copy_pages

SHAPES = [SHAPE, Shape(3, 256, 4)]


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("elements", [7, 300])
def test_the_named_pages_and_no_others(
    shape: Shape, dtype: torch.dtype, elements: int, device: torch.device
) -> None:
    """To page-first objects and back; the objects have another part before."""
    num_layers, pages, places = 3, torch.tensor([2, 4, 0]), torch.tensor([5, 0, 3])
    drawn = torch.randint(0, 120, (num_layers, 6, elements)).to(dtype)
    objects = on_host(torch.full((8, 5 + num_layers * elements), 121).to(dtype), device)
    host = objects[:, 5:].view(8, num_layers, elements).transpose(0, 1)
    want = host.clone()
    on_cpu(want, places, drawn, pages)
    copy_pages(host, places.to(device), drawn.to(device), pages.to(device), shape)
    _wait(device)
    assert torch.equal(host, want)
    assert bool((objects[:, :5] == 121).all())
    back = torch.full_like(drawn, 122)
    want = back.clone()
    on_cpu(want, pages, host, places)
    back = back.to(device)
    copy_pages(back, pages.to(device), host, places.to(device), shape)
    assert torch.equal(back.cpu(), want)


def test_nothing_is_copied_of_no_pages(device: torch.device) -> None:
    target = torch.zeros(2, 3, 4, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    copy_pages(target, none, torch.ones(2, 5, 4, device=device), none)
    assert not target.any()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
