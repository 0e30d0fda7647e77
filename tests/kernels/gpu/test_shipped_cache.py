"""Triton finds what an image ships where its own cache has nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.cache import get_cache_manager

from kernels.gpu import shipped_cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Triton's cache as a gpu image sets it up, and the folder of what is shipped for its key."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "kernels.gpu.shipped_cache:ShippedCache")
    monkeypatch.setattr(shipped_cache, "SHIPPED", tmp_path / "shipped")
    cache = get_cache_manager("f00d")
    folder = tmp_path / "shipped" / cache.key
    folder.mkdir(parents=True)
    return cache, folder


def test_what_is_shipped_is_found(cache):
    cache, folder = cache
    assert cache.get_file("cuda_utils.so") is None
    (folder / "cuda_utils.so").write_text("shipped")
    assert cache.get_file("cuda_utils.so") == str(folder / "cuda_utils.so")


def test_what_was_compiled_here_comes_first(cache):
    cache, folder = cache
    (folder / "kernel.cubin").write_text("shipped")
    path = cache.put("compiled", "kernel.cubin")
    assert cache.get_file("kernel.cubin") == path
    assert Path(path).read_text() == "compiled"
