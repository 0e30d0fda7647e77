"""Pages between layer-first and page-first arrays, element by element."""

from __future__ import annotations

import pytest
import torch

from kernels.copy_pages import copy_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("to_page_first", [True, False])
def test_the_named_pages_and_no_others(dtype: torch.dtype, to_page_first: bool) -> None:
    num_layers, elements = 3, 7
    layer_first = torch.arange(num_layers * 6 * elements).remainder(120).to(dtype)
    layer_first = layer_first.view(num_layers, 6, elements)
    objects = torch.full((8, 4 + num_layers * elements), 121, dtype=dtype)  # other parts before
    page_first = objects[:, 4:].view(8, num_layers, elements).transpose(0, 1)
    source, target = layer_first, page_first
    if not to_page_first:
        page_first.copy_(layer_first[:, [0, 1, 2, 3, 4, 5, 0, 1]] + 1)
        source, target = page_first, layer_first
    want = target.clone()
    pairs = {5: 2, 0: 4, 3: 0}
    for to, at in pairs.items():
        for layer in range(num_layers):
            want[layer, to] = source[layer, at]
    copy_pages(target, torch.tensor(list(pairs)), source, torch.tensor(list(pairs.values())))
    assert torch.equal(target, want)
    assert bool((objects[:, :4] == 121).all())


def test_nothing_is_copied_of_no_pages() -> None:
    target = torch.zeros(2, 3, 4)
    none = torch.empty(0, dtype=torch.int64)
    copy_pages(target, none, torch.ones(2, 5, 4), none)
    assert not target.any()
