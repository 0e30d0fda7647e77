"""Which worker holds which pages, by their hashes, as the workers' events tell.

Owned by two threads: the reader applies events, the event loop asks. Neither waits for the other,
and no step of either is long: a worker's hashes lie in many small tables, so that growing or
freeing one takes microseconds. Knows no load and no request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from kvcache.events import HASH_BYTES, KVEvents, split_hashes
from server.router.breath import Breath

_NUM_SHARDS = 256  # by a hash's first byte
_SWEPT_SHARDS = 16  # freed at each apply
_BREATH_PAGES = 128  # some 0.1 ms

# Dicts for sets: the garbage collector walks through every set, but not through dicts of bytes and
# None, and a full collection over a million hashes would stop the event loop for tens of ms.
Shard = dict[bytes, None]


class _Held:
    __slots__ = ("max_pages", "num_pages", "shards")

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.num_pages = 0
        self.shards = _new_shards()


class PrefixIndex:
    """Every worker's pages. What it says is an estimate: a worker may have dropped a page since its
    last events, and a page that is being computed is not known yet."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._to_free: deque[Shard] = deque()  # nobody asks for them; freed bit by bit
        self._breath = Breath(_BREATH_PAGES)  # the reader's

    def add(self, worker_key: str, max_pages: int) -> None:
        """A worker whose events count from now on; of its pages at most `max_pages` are kept, which
        bounds the index. Any thread, before the worker's first events."""
        self._held[worker_key] = _Held(max_pages)

    def drop(self, worker_key: str) -> None:
        """Forget a worker; events that come late for it are ignored. Any thread."""
        held = self._held.pop(worker_key, None)
        if held is not None:
            self._to_free.extend(held.shards)

    def apply(self, worker_key: str, events: KVEvents) -> None:
        """What changed at a worker; nothing where it was not added. The reader thread only."""
        for _ in range(min(_SWEPT_SHARDS, len(self._to_free))):
            self._to_free.popleft().clear()
        held = self._held.get(worker_key)
        if held is None:
            return
        if events.reset:
            self._to_free.extend(held.shards)
            held.shards = _new_shards()
            held.num_pages = 0
        shards = held.shards
        for run in self._runs(events.removed):
            for page in run:
                shard = shards[page[0]]
                if page in shard:
                    del shard[page]
                    held.num_pages -= 1
        for run in self._runs(events.stored):
            for page in run:
                shard = shards[page[0]]
                if page not in shard and held.num_pages < held.max_pages:
                    shard[page] = None
                    held.num_pages += 1

    def matched(self, hashes: Sequence[bytes], worker_keys: Iterable[str]) -> dict[str, int]:
        """How many of the leading `hashes` each worker holds; 0 for one that was not added. Takes
        O(log) a worker: who holds a page holds those before it, as its events are ordered."""
        return {key: self._num_leading(key, hashes) for key in worker_keys}

    def num_pages(self, worker_key: str) -> int:
        held = self._held.get(worker_key)
        return held.num_pages if held else 0

    def _runs(self, data: bytes) -> Iterator[list[bytes]]:
        """The hashes in `data`, with a breath after each run."""
        width = HASH_BYTES * _BREATH_PAGES
        for start in range(0, len(data), width):
            run = split_hashes(data[start : start + width])
            yield run
            self._breath.after(len(run))

    def _num_leading(self, worker_key: str, hashes: Sequence[bytes]) -> int:
        held = self._held.get(worker_key)
        if held is None:
            return 0
        shards = held.shards
        return bisect_left(hashes, True, key=lambda page: page not in shards[page[0]])


def _new_shards() -> list[Shard]:
    return [{} for _ in range(_NUM_SHARDS)]
