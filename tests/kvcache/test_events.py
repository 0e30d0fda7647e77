"""Hashes of pages, and the stream of events: who replays it knows exactly what the tree holds."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.allocator import CPSharedPagedAllocator
from kvcache.events import EventLog, KVEvents, page_hashes, root_hash, split_hashes
from kvcache.prefix_cache import Node, PrefixCache

SALT = b"pepper"


def hashes_of(token_ids: list[int], page_size: int, salt: bytes = SALT) -> list[bytes]:
    """By the definition, token for token."""
    before, found = hashlib.sha256(salt).digest()[:16], []
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page = token_ids[start : start + page_size]
        data = b"".join(token.to_bytes(4, "little") for token in page)
        before = hashlib.sha256(before + data).digest()[:16]
        found.append(before)
    return found


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def replay(known: set[bytes], events: KVEvents | None) -> set[bytes]:
    if events is None:
        return known
    known = set() if events.reset else set(known)
    known -= set(split_hashes(events.removed))
    return known | set(split_hashes(events.stored))


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    page_size=st.integers(1, 9),
    salt=st.binary(max_size=40),
)
def test_hashes_are_the_chain_over_whole_pages(
    tokens: list[int], page_size: int, salt: bytes
) -> None:
    assert page_hashes(tokens, page_size, salt) == hashes_of(tokens, page_size, salt)


@pytest.mark.parametrize("num_pages", [1, 63, 64, 65, 200])
def test_long_prompts_are_hashed_the_same(num_pages: int) -> None:
    tokens = [i * i % 50_000 for i in range(num_pages * 3 + 2)]
    assert page_hashes(tokens, 3, SALT) == hashes_of(tokens, 3)


def test_hashing_goes_on_behind_a_page() -> None:
    tokens = list(range(100))
    whole = page_hashes(tokens, 4, SALT)
    assert page_hashes(tokens[40:], 4, SALT, after=whole[9]) == whole[10:]
    assert page_hashes([], 4, SALT) == []


def test_a_hash_covers_the_salt_and_every_token_before() -> None:
    tokens = list(range(8))
    base = page_hashes(tokens, 4, SALT)
    assert page_hashes([9, *tokens[1:]], 4, SALT)[1] != base[1]
    assert set(base).isdisjoint(page_hashes(tokens, 4, b"other"))
    assert root_hash(SALT) not in base


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_ids_that_take_more_than_four_bytes_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=rf"must be in \[0, 2\*\*32\), got {token}"):
        page_hashes([5, token], 2, SALT)


def test_the_module_imports_no_torch() -> None:
    code = "import sys, kvcache.events; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_events_travel_and_parts_of_hashes_are_refused() -> None:
    events = KVEvents(name(1) + name(2), name(3), True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=KVEvents) == events
    with pytest.raises(ValueError, match="removed must be whole hashes of 16 bytes, got 17"):
        KVEvents(removed=bytes(17))
    raw = {"type": "kv_events", "stored": bytes(15), "removed": b"", "reset": False}
    with pytest.raises(msgspec.ValidationError, match="stored must be whole hashes"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=KVEvents)


def test_what_came_and_went_in_between_is_not_mentioned() -> None:
    log = EventLog()
    assert log.take() is None
    log.store([name(1), name(2)])
    log.remove([name(2)])
    assert log.take() == KVEvents(stored=name(1))
    log.remove([name(1)])
    log.store([name(1)])
    assert log.take() is None
    log.remove([name(1)])
    log.store([name(1)])
    log.remove([name(1)])
    assert log.take() == KVEvents(removed=name(1))
    assert log.take() is None


def test_a_reset_forgets_what_was_not_told_yet() -> None:
    log = EventLog()
    log.store([name(1)])
    log.take()
    log.remove([name(1)])
    log.store([name(2)])
    log.reset()
    log.store([name(1)])
    assert log.take() == KVEvents(stored=name(1), reset=True)
    assert log.held() == {name(1)}


def test_a_snapshot_tells_what_was_taken_in_parts() -> None:
    log = EventLog()
    assert log.snapshot_parts(2) == [KVEvents(reset=True)]
    log.store([name(1), name(2), name(3)])
    log.take()
    log.remove([name(3)])
    log.store([name(4)])
    parts = [KVEvents(name(1) + name(2), reset=True), KVEvents(name(3))]
    assert log.snapshot_parts(2) == parts
    assert log.take() == KVEvents(name(4), name(3))
    with pytest.raises(ValueError, match="max_hashes must be positive, got 0"):
        log.snapshot_parts(0)


def test_a_split_keeps_the_hashes_of_both_parts() -> None:
    log = EventLog(SALT)
    cache = PrefixCache(CPSharedPagedAllocator(9, 2), log)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [1, 2, 8, 8]):
        match = cache.match(tokens)
        pages = cache.device.alloc(len(tokens) // 2 - len(match.pages))
        assert pages is not None
        cache.insert(tokens, match.pages + pages)
        cache.check()
    expected = {*hashes_of([1, 2, 3, 4, 5, 6], 2), *hashes_of([1, 2, 3, 4, 9, 9], 2)}
    assert replay(set(), log.take()) == expected | set(hashes_of([1, 2, 8, 8], 2))
    cache.reset()
    assert log.take() == KVEvents(reset=True)


class Streams(RuleBasedStateMachine):
    """Random inserts, evictions and resets under locks. Listeners join at any time by snapshot; all
    must know what the model knows, which is the prefixes by their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[tuple[Node, list[int]]] = []
        self.listeners: list[set[bytes]] = [set()]

    @initialize(page_size=st.integers(1, 3), pages=st.integers(2, 14))
    def start(self, page_size: int, pages: int) -> None:
        self.page_size = page_size
        self.log = EventLog(SALT)
        self.cache = PrefixCache(CPSharedPagedAllocator(pages, page_size), self.log)
        self.ever: list[list[int]] = []  # every prompt that was inserted

    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        locks=st.booleans(),
    )
    def insert(self, data: st.DataObject, tokens: list[int], locks: bool) -> None:
        if self.ever and data.draw(st.booleans(), label="goes on from a prompt before"):
            tokens = [*data.draw(st.sampled_from(self.ever)), *tokens][:40]
        match = self.cache.match(tokens)
        self.cache.lock(match.node)
        pages = self.cache.device.alloc(len(tokens) // self.page_size - len(match.pages))
        if pages is not None:
            inserted = self.cache.insert(tokens, match.pages + pages)
            self.ever.append(tokens)
            if locks:
                self.cache.lock(inserted.node)
                self.locked.append((inserted.node, tokens))
        self.cache.unlock(match.node)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locked) - 1), label="lock")
        self.cache.unlock(self.locked.pop(index)[0])

    @rule(num_pages=st.integers(1, 8))
    def evict(self, num_pages: int) -> None:
        self.cache.device.evict(num_pages)

    @precondition(lambda self: not self.locked)
    @rule()
    def reset(self) -> None:
        self.cache.reset()

    @rule()
    def take(self) -> None:
        events = self.log.take()
        self.listeners = [replay(known, events) for known in self.listeners]
        for known in self.listeners:
            assert known == self.in_tree()

    @rule(max_hashes=st.integers(1, 5))
    def join(self, max_hashes: int) -> None:
        known = {b"what it believed before"}
        for part in self.log.snapshot_parts(max_hashes):
            assert len(part.stored) <= 16 * max_hashes
            known = replay(known, part)
        assert known == self.listeners[0]
        self.listeners.append(known)

    def in_tree(self) -> set[bytes]:
        """Asked from outside: every prefix of every prompt that ever was, by a match."""
        found: set[bytes] = set()
        for tokens in self.ever:
            num_cached = self.cache.match(tokens).num_tokens
            found.update(hashes_of(tokens[:num_cached], self.page_size))
        return found

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.take()


Streams.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestStreams = Streams.TestCase


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_at_every_hash_of_a_stream_who_holds_a_page_holds_the_pages_before(
    data: st.DataObject,
) -> None:
    log = EventLog(SALT)
    cache = PrefixCache(CPSharedPagedAllocator(6, 1), log)
    held: set[bytes] = set()
    prompts = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=12))
    parent: dict[bytes, bytes] = {}
    for tokens in prompts:
        chain = hashes_of(tokens, 1)
        parent.update(zip(chain[1:], chain, strict=False))
        match = cache.match(tokens)
        cache.lock(match.node)
        pages = cache.device.alloc(len(tokens) - len(match.pages))
        if pages is not None:
            cache.insert(tokens, match.pages + pages)
        cache.unlock(match.node)
        events = log.take() if data.draw(st.booleans(), label="take") else None
        if events is None:
            continue
        parts = data.draw(st.integers(1, 4), label="snapshot parts of")
        snapshot = [
            page for part in log.snapshot_parts(parts) for page in split_hashes(part.stored)
        ]
        for page in split_hashes(events.removed):
            held.remove(page)
            assert all(parent.get(other) in held | {None} for other in held)
        for page in split_hashes(events.stored):
            assert parent.get(page) in held | {None}
            held.add(page)
        assert set(snapshot) == held
        for i, page in enumerate(snapshot):
            assert parent.get(page) in {*snapshot[:i], None}
