"""Attention over parts of keys: the GPU's form against the torch form of kernels.streamed."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels import streamed
from kernels.attention import Partial, merge
from kernels.gpu import attention as gpu


def close(found: Partial, want: Partial) -> None:
    torch.testing.assert_close(found.out, want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.lse, want.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [16, 96])
def test_causal_parts(dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries at 3, 8, 13, ...: of some parts they see all, a part or nothing."""
    monkeypatch.setattr(streamed, "gpu_kernels", lambda *tensors: False)
    q = torch.randn(21, 4, dim, device=device)
    k, v = torch.randn(100, 2, dim, device=device), torch.randn(100, 2, 24, device=device)
    found: Partial | None = None
    want: Partial | None = None
    for a, b in itertools.pairwise((0, 40, 41, 100)):
        found = gpu.attend_causal(q, k[a:b], v[a:b], 3 - a, 5, 0.3, found)
        want = streamed.attend_causal(q, k[a:b], v[a:b], 3 - a, 5, 0.3, want)
    assert found is not None and want is not None
    close(found, want)


def test_chosen_rows_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "gpu_kernels", lambda *tensors: False)
    q, cache = torch.randn(6, 3, 48, device=device), torch.randn(60, 48, device=device)
    rows = torch.randint(0, 60, (6, 20), device=device)
    counts = torch.tensor([20, 0, 3, 11, 1, 0], device=device)
    found = gpu.mla_rows_part(q, cache, rows, counts, 32, 0.2)
    want = streamed.mla_rows_part(q, cache, rows, counts, 32, 0.2)
    close(found, want)
    both = merge(found, want)
    assert not both.out.isnan().any() and bool((both.lse[1] == -torch.inf).all())
