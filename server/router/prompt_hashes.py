"""The hashes of a prompt's pages, computed in a thread beside the event loop. A prompt of 128k
tokens takes some 6 ms of Python, which would stop the loop if done there or in one go."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.events import page_hashes
from server.router.breath import Breath

_RUN_PAGES = 32  # some 0.1 ms


def prompt_hashes(token_ids: Sequence[int], page_size: int, salt: bytes) -> list[bytes]:
    """`kvcache.events.page_hashes`, in short runs."""
    breath = Breath(_RUN_PAGES)
    hashes: list[bytes] = []
    for start in range(0, len(token_ids), _RUN_PAGES * page_size):
        run = token_ids[start : start + _RUN_PAGES * page_size]
        hashes += page_hashes(run, page_size, salt, after=hashes[-1] if hashes else None)
        breath.after(_RUN_PAGES)
    return hashes
