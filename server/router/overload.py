"""Who said that it can take no more for now. A hint expires, so that nobody is shunned for ever for
what it said once.

Owned by the event loop. Reads the clock it is given and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable


class OverloadHints:
    """Hints of workers, each good for `hold_s` seconds. `now_s` is a clock that never goes back
    (time.monotonic)."""

    def __init__(self, hold_s: float, now_s: Callable[[], float]) -> None:
        if hold_s <= 0:
            raise ValueError(f"hold_s must be positive, got {hold_s}")
        self._hold_s = hold_s
        self._now_s = now_s
        self._until_s: dict[str, float] = {}

    def mark(self, worker_key: str) -> None:
        """The worker is overloaded, from now for `hold_s`."""
        self._until_s[worker_key] = self._now_s() + self._hold_s

    def clear(self, worker_key: str) -> None:
        """The worker is not overloaded any more, or gone."""
        self._until_s.pop(worker_key, None)

    def is_overloaded(self, worker_key: str) -> bool:
        until_s = self._until_s.get(worker_key)
        if until_s is None:
            return False
        if self._now_s() < until_s:
            return True
        del self._until_s[worker_key]
        return False
