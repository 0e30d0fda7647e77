"""Kernels that were compiled when plait was packed are taken into a new cache folder."""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the CPU kernels are numba's")

from kernels.cpu import threads


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A shipped kernel for these sources; its folder."""
    monkeypatch.setenv("PLAIT_HOME", str(tmp_path / "packing"))
    folder = threads.cache_folder()
    (folder / "kernel.nbi").write_text("shipped")
    monkeypatch.setattr(threads, "SHIPPED", folder.parent)
    return folder


def test_a_new_folder_begins_with_what_was_shipped(shipped, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_HOME", str(tmp_path / "home"))
    folder = threads.cache_folder()
    assert folder.parent.parent == tmp_path / "home"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name] == [shipped.name]
    assert (folder / "kernel.nbi").read_text() == "shipped"
    assert not threads.is_cache_empty()


def test_a_folder_that_is_there_is_left_as_it_is(shipped, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_HOME", str(tmp_path / "home"))
    (tmp_path / "home/numba" / shipped.name).mkdir(parents=True)
    assert not any(threads.cache_folder().iterdir())


def test_kernels_of_other_sources_are_not_taken(shipped, tmp_path, monkeypatch):
    shipped.rename(shipped.with_name("other"))
    monkeypatch.setenv("PLAIT_HOME", str(tmp_path / "home"))
    assert threads.is_cache_empty()
