"""Which build of Mooncake may move a GPU's memory."""

from __future__ import annotations

import importlib.metadata

import pytest

from kvcache.transfer.base import TransferUnavailableError
from kvcache.transfer.system import check_reaches_gpus


@pytest.mark.parametrize("installed", ["non-cuda", "cuda13"])
def test_the_build_without_cuda_is_refused_on_a_gpu(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name != f"mooncake-transfer-engine-{installed}":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.3.13"

    monkeypatch.setattr(importlib.metadata, "version", version)
    if installed == "cuda13":
        check_reaches_gpus()
        return
    with pytest.raises(
        TransferUnavailableError, match=r"non-cuda cannot move .*engine-cuda13; --col"
    ):
        check_reaches_gpus()
