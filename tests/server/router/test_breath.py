"""A thread breathes after so many pages, however they come."""

from __future__ import annotations

import time

import pytest

from server.router.breath import Breath


def test_one_breath_after_so_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    breath = Breath(100)
    counts = []
    for num_pages in (60, 30, 10, 99, 1, 250, 0):
        breath.after(num_pages)
        counts.append(len(slept))
    assert counts == [0, 0, 1, 1, 2, 3, 3]
    assert all(0 < seconds < 1e-3 for seconds in slept)  # 0 would not leave the core
