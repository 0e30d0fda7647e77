"""How a thread with much to compute in Python stays out of the event loop's way.

The interpreter lets one thread run at a time. A thread that never waits keeps the loop waiting for
a whole switch interval (5 ms by default) and, where cores are short, for the scheduler's time slice
on top. One that sleeps for a moment every fraction of a millisecond is passed at once.
"""

from __future__ import annotations

import time

_SLEEP_S = 5e-5  # the kernel makes about twice that of it; enough for the loop to wake up


class Breath:
    """Counts pages and pauses the thread after every `every_pages`. One a thread."""

    def __init__(self, every_pages: int) -> None:
        self._every_pages = every_pages
        self._since = 0

    def after(self, num_pages: int) -> None:
        self._since += num_pages
        if self._since >= self._every_pages:
            self._since = 0
            time.sleep(_SLEEP_S)
