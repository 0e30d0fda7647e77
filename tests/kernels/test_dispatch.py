"""Who takes a call, and what is said about it."""

from __future__ import annotations

import logging

import pytest
import torch

from kernels import dispatch


def test_a_fall_back_is_said_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kernels.dispatch"):
        for why in ("9 is odd", "9 is odd", "11 is odd"):
            dispatch.fall_back("a kernel", why)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"a kernel is computed by torch, which is slower: {n} is odd" for n in (9, 11)]


def test_kernels_of_a_gpu_take_no_call_on_a_cpu() -> None:
    assert not dispatch.gpu_kernels(torch.zeros(2))


@pytest.mark.parametrize("installed, said", [(True, "numba"), (False, "torch: numba is absent")])
def test_description_of_a_cpu(installed: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "numba_kernels", lambda: object() if installed else None)
    assert dispatch.describe(torch.device("cpu")) == said
