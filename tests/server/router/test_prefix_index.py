"""The index: replayed streams against sets, late and foreign events, bounds, two threads."""

from __future__ import annotations

import threading
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.events import EventLog, KVEvents, page_hashes
from server.router.prefix_index import PrefixIndex

KEYS = ("a", "b", "c")
TREE = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=8)


def chain(tokens: list[int]) -> list[bytes]:
    return page_hashes(tokens, 1, b"salt")


def stored(hashes: list[bytes], reset: bool = False) -> KVEvents:
    return KVEvents(stored=b"".join(hashes), reset=reset)


def removed(hashes: list[bytes]) -> KVEvents:
    return KVEvents(removed=b"".join(reversed(hashes)))


def index_of(**pages: list[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    for key, hashes in pages.items():
        index.add(key, 10_000)
        index.apply(key, stored(hashes))
    return index


def test_leading_pages_are_counted_for_each_worker() -> None:
    prompt = chain(list(range(20)))
    other = chain([*range(5), 99, 98])
    index = index_of(a=prompt[:12], b=other, c=[])
    assert index.matched(prompt, KEYS) == {"a": 12, "b": 5, "c": 0}
    assert index.matched(prompt[:3], KEYS) == {"a": 3, "b": 3, "c": 0}
    assert index.matched([], KEYS) == {"a": 0, "b": 0, "c": 0}
    assert index.matched(prompt, ["a", "nobody"]) == {"a": 12, "nobody": 0}


def test_what_is_removed_is_not_matched() -> None:
    prompt = chain(list(range(20)))
    index = index_of(a=prompt, b=prompt)
    index.apply("a", removed(prompt[7:]))
    assert index.matched(prompt, ["a", "b"]) == {"a": 7, "b": 20}
    index.apply("a", removed(prompt[7:]))  # said twice
    assert index.num_pages("a") == 7


def test_a_reset_comes_first() -> None:
    prompt = chain(list(range(20)))
    index = index_of(a=prompt)
    index.apply("a", stored(prompt[:4], reset=True))
    assert index.matched(prompt, ["a"]) == {"a": 4}
    index.apply("a", KVEvents(reset=True))
    assert index.num_pages("a") == 0


def test_events_of_a_worker_that_is_gone_or_unknown_are_ignored() -> None:
    prompt = chain(list(range(20)))
    index = index_of(a=prompt)
    index.drop("a")
    index.drop("never there")
    index.apply("a", stored(prompt))
    assert index.matched(prompt, ["a"]) == {"a": 0}
    index.add("a", 100)
    assert index.matched(prompt, ["a"]) == {"a": 0}
    index.apply("a", stored(prompt))
    assert index.matched(prompt, ["a"]) == {"a": 20}


def test_no_more_pages_are_kept_than_a_worker_has() -> None:
    prompt = chain(list(range(20)))
    index = PrefixIndex()
    index.add("a", 8)
    index.apply("a", stored(prompt))
    index.apply("a", stored(prompt))
    assert (index.num_pages("a"), index.matched(prompt, ["a"])) == (8, {"a": 8})
    index.apply("a", removed(prompt[6:]))
    index.apply("a", stored(prompt[6:7]))
    assert index.matched(prompt, ["a"]) == {"a": 7}


def test_memory_of_dropped_workers_comes_back() -> None:
    prompt = chain(list(range(20_000)))
    tracemalloc.start()
    try:
        index = index_of(stays=[])
        empty, _ = tracemalloc.get_traced_memory()
        for key in ("dropped", "reset"):
            index.add(key, 20_000)
            index.apply(key, stored(prompt))
        full, _ = tracemalloc.get_traced_memory()
        index.drop("dropped")
        index.apply("reset", KVEvents(reset=True))
        index.drop("reset")
        for _ in range(100):
            index.apply("stays", KVEvents())
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left - empty < (full - empty) / 100


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(KEYS), st.sampled_from(["tell", "drop", "join"]), TREE),
        max_size=12,
    ),
    asked=st.lists(st.integers(0, 1), max_size=8),
)
@settings(deadline=None)
def test_it_matches_what_the_workers_hold(
    steps: list[tuple[str, str, list[list[int]]]], asked: list[int]
) -> None:
    """Workers hold trees of prompts that change as a whole; parents are stored first."""
    index = PrefixIndex()
    logs = {key: EventLog() for key in KEYS}
    known: set[str] = set()
    for key, step, prompts in steps:
        log = logs[key]
        new = list(dict.fromkeys(page for prompt in prompts for page in chain(prompt)))
        held = log.held()
        lost = [page for part in log.snapshot_parts(10**6) for page in _pages(part.stored)]
        log.remove([page for page in reversed(lost) if page not in new])
        log.store([page for page in new if page not in held])
        events = log.take()
        if step == "drop":
            index.drop(key)
            known.discard(key)
        elif step == "join":
            index.add(key, 1000)
            known.add(key)
            for part in log.snapshot_parts(3):
                index.apply(key, part)
        elif events is not None:
            index.apply(key, events)
    hashes = chain(asked)
    for key in KEYS:
        held = logs[key].held() if key in known else set()
        leading = next((i for i, page in enumerate(hashes) if page not in held), len(hashes))
        assert index.matched(hashes, [key]) == {key: leading}
        assert index.num_pages(key) == len(held)


def _pages(data: bytes) -> list[bytes]:
    return [data[i : i + 16] for i in range(0, len(data), 16)]


def test_one_thread_asks_while_another_applies() -> None:
    prompt = chain(list(range(600)))
    index = index_of(a=prompt[:100], b=prompt)
    is_done = threading.Event()

    def change() -> None:
        try:
            for _ in range(30):
                index.apply("a", stored(prompt[100:]))
                index.apply("a", removed(prompt[100:]))
                index.apply("a", stored(prompt[:100], reset=True))
        finally:
            is_done.set()

    thread = threading.Thread(target=change)
    thread.start()
    answers = []
    while not is_done.is_set():
        answers.append(index.matched(prompt, ["a", "b"]))
    thread.join()
    assert all(0 <= found["a"] <= 600 and found["b"] == 600 for found in answers)
    assert index.matched(prompt, ["a", "b"]) == {"a": 100, "b": 600}
