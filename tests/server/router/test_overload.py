"""Overload hints: held for a while, renewed, taken back; the clock is the test's."""

from __future__ import annotations

import pytest

from server.router.overload import OverloadHints


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_hint_expires() -> None:
    clock = Clock()
    hints = OverloadHints(2.0, clock)
    assert not hints.is_overloaded("a")
    hints.mark("a")
    clock.now_s = 101.9
    assert hints.is_overloaded("a")
    assert not hints.is_overloaded("b")
    clock.now_s = 102.0
    assert not hints.is_overloaded("a")


def test_a_hint_given_again_holds_from_then() -> None:
    clock = Clock()
    hints = OverloadHints(2.0, clock)
    hints.mark("a")
    clock.now_s = 101.5
    hints.mark("a")
    clock.now_s = 103.0
    assert hints.is_overloaded("a")
    clock.now_s = 103.5
    assert not hints.is_overloaded("a")


def test_a_hint_can_be_taken_back() -> None:
    hints = OverloadHints(2.0, Clock())
    hints.mark("a")
    hints.clear("a")
    hints.clear("never marked")
    assert not hints.is_overloaded("a")


@pytest.mark.parametrize("hold_s", [0.0, -1.0])
def test_a_hint_must_hold_for_some_time(hold_s: float) -> None:
    with pytest.raises(ValueError, match=f"hold_s must be positive, got {hold_s}"):
        OverloadHints(hold_s, Clock())
