"""What a prefix cache holds, told to those outside: a name for every page, and what came and went.

Owns the names (hashes) of pages and what is not told yet. Knows no tree, no socket and no request;
imports no torch, because the front end names a prompt's pages with the same function.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

import msgspec

HASH_BYTES = 16
_RUN_PAGES = 64  # encoded in one call: short, so that other threads get their turn


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """4 bytes a token, little-endian. ValueError for a token id outside [0, 2**32)."""
    try:
        data = array("I", token_ids)
    except OverflowError:
        bad = next(token for token in token_ids if not 0 <= token < 2**32)
        raise ValueError(f"token ids must be in [0, 2**32), got {bad}") from None
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def root_hash(salt: bytes) -> bytes:
    """What stands before the first page of every prompt. Hashes of different salts have nothing to
    do with each other, and without the salt nobody can tell the tokens behind a hash by trying."""
    return sha256(salt).digest()[:HASH_BYTES]


def chain_hashes(before: bytes, page_keys: Iterable[bytes]) -> list[bytes]:
    """The hashes of pages in a row, [num_pages] of 16 bytes, from their tokens' bytes. `before` is
    the hash of the page before the first (or `root_hash`), so each covers all tokens up to its end.
    """
    hashes = []
    for key in page_keys:
        before = sha256(before + key).digest()[:HASH_BYTES]
        hashes.append(before)
    return hashes


def page_hashes(
    token_ids: Sequence[int], page_size: int, salt: bytes, after: bytes | None = None
) -> list[bytes]:
    """The hashes of the whole pages of `token_ids`, [len(token_ids) // page_size]. With `after`,
    `token_ids` go on behind the page of that hash. ValueError as in `token_bytes`."""
    hashes: list[bytes] = []
    before = root_hash(salt) if after is None else after
    width = 4 * page_size
    num_tokens = len(token_ids) // page_size * page_size
    for start in range(0, num_tokens, _RUN_PAGES * page_size):
        data = token_bytes(token_ids[start : min(num_tokens, start + _RUN_PAGES * page_size)])
        hashes += chain_hashes(before, [data[i : i + width] for i in range(0, len(data), width)])
        before = hashes[-1]
    return hashes


def split_hashes(data: bytes) -> list[bytes]:
    """The hashes that `data` is made of."""
    return [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]


class KVEvents(msgspec.Struct, frozen=True, tag="kv_events"):
    """What changed in a worker's prefix cache, as hashes of 16 bytes in a row. Apply `reset`, then
    `removed`, then `stored`: children leave before their parents and come after them, so that who
    holds a page holds all before it at any moment. Saying a thing twice does no harm. ValueError
    (ValidationError when decoded) for a part of a hash."""

    stored: bytes = b""
    removed: bytes = b""
    reset: bool = False  # forget what you knew of this worker first

    def __post_init__(self) -> None:
        for name, data in (("stored", self.stored), ("removed", self.removed)):
            if len(data) % HASH_BYTES:
                raise ValueError(
                    f"{name} must be whole hashes of {HASH_BYTES} bytes, got {len(data)} bytes"
                )


class EventLog:
    """Collects what one tree stores and drops, and remembers what it has told. Not thread-safe."""

    def __init__(self, salt: bytes = b"") -> None:
        self.root = root_hash(salt)
        self._told: dict[bytes, None] = {}  # in order: a page comes after the one before it
        self._pending: dict[bytes, bool] = {}  # not told yet; True: stored, False: removed
        self._is_reset = False

    def store(self, hashes: Iterable[bytes]) -> None:
        """Pages the tree has got, parents first."""
        for page in hashes:
            if self._pending.pop(page, True):
                self._pending[page] = True

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Pages the tree has lost, children first."""
        for page in hashes:
            if not self._pending.pop(page, False):
                self._pending[page] = False

    def reset(self) -> None:
        """The tree is empty now."""
        self._pending.clear()
        self._is_reset = True

    def take(self) -> KVEvents | None:
        """What has changed since the last take; None where nothing has. What came and went again
        in between is not mentioned."""
        if not self._pending and not self._is_reset:
            return None
        stored = [page for page, is_stored in self._pending.items() if is_stored]
        removed = [page for page, is_stored in self._pending.items() if not is_stored]
        events = KVEvents(b"".join(stored), b"".join(removed), self._is_reset)
        if self._is_reset:
            self._told.clear()
        for page in removed:
            self._told.pop(page, None)
        self._told.update(dict.fromkeys(stored))
        self._pending.clear()
        self._is_reset = False
        return events

    def snapshot_parts(self, max_hashes: int) -> list[KVEvents]:
        """All that was told up to the last take, for one who joins: at least one part, each of at
        most `max_hashes` hashes, the first with `reset`. The next take goes on from there.
        ValueError unless max_hashes is positive."""
        if max_hashes <= 0:
            raise ValueError(f"max_hashes must be positive, got {max_hashes}")
        told = list(self._told)
        starts = range(0, max(1, len(told)), max_hashes)
        return [KVEvents(b"".join(told[i : i + max_hashes]), reset=i == 0) for i in starts]

    def held(self) -> set[bytes]:
        """What the tree holds, told or not."""
        held = set() if self._is_reset else set(self._told)
        held.difference_update(page for page, is_stored in self._pending.items() if not is_stored)
        held.update(page for page, is_stored in self._pending.items() if is_stored)
        return held
