"""Triton finds what an image ships where its own cache has nothing; a full disk says what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.cache import get_cache_manager

from kernels.gpu import triton_cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Triton's cache as our kernels set it up, and the folder of what is shipped for its key."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton_cache, "SHIPPED", tmp_path / "shipped")
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


def test_a_full_disk_names_the_folder_and_how_to_have_another(cache, tmp_path, monkeypatch):
    cache, _ = cache

    def is_full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = f"set TRITON_CACHE_DIR to a folder elsewhere: '{tmp_path / 'cache'}'"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=said):
        patch.setattr(os, "replace", is_full)
        cache.put("compiled", "kernel.cubin")
    with monkeypatch.context() as patch, pytest.raises(OSError, match=said):
        patch.setattr(os, "makedirs", is_full)
        get_cache_manager("cafe")
