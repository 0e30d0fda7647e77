"""Random traces over both tiers with real bytes: whatever interleaves, every cached page holds what
its tokens demand, copies stay on their rank, locks end at zero and nothing leaks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.host_copies import ThreadCopier
from kvcache.host_metadata import CpHiCacheNodeMetadata
from kvcache.host_plan import HostItem, LoadBack
from kvcache.host_tier import HostTier
from kvcache.layout import KVGeometry
from kvcache.prefix_cache import LoadedBack, Match, Node
from kvcache.tiered_cache import TieredCache, WritePolicy
from tests.kvcache.host_group import DSA, FP8, GQA, MLA, Group

POLICIES: list[WritePolicy] = ["write_through", "write_through_selective", "write_back"]


@dataclass
class Running:
    token_ids: list[int]
    pages: list[int]
    node: Node
    num_tree: int  # tokens


class Trace:
    """One step after another, drawn by `rng`."""

    def __init__(self, rng: random.Random, group: Group) -> None:
        self.rng, self.group, self.cache = rng, group, group.cache
        self.running: list[Running] = []
        self.pinned: dict[tuple[int, ...], int] = {}  # prefixes, until when
        roots = [[root] * 5 for root in range(3)]
        self.documents = [
            rng.choice(roots) + [rng.randrange(9) for _ in range(rng.randint(3, 9))]
            for _ in range(8)
        ]

    def run(self, num_steps: int) -> None:
        actions = [self.admit] * 8 + [self.keep, self.finish, self.finish, self.abort]
        actions += [self.pin]
        actions += [self.evict, self.copy, self.copy, self.report, self.report, self.reclaim]
        for _ in range(num_steps):
            self.rng.choice(actions)()
            self.check_locks()
            self.group.check()

    def prompt(self) -> list[int]:
        """One of a few documents, some with the same beginning, and sometimes a bit of its own."""
        rng = self.rng
        document = rng.choice(self.documents)
        own = [rng.randrange(3) for _ in range(rng.choice([0, 1, 3]))]
        return document[: rng.randint(1, len(document))] + own

    def admit(self) -> None:
        """Match, perhaps load back, take pages; then the step: its copies, its forward."""
        rng, cache, group = self.rng, self.cache, self.group
        if len(self.running) == 3:
            return self.finish()
        token_ids = self.prompt()
        match = cache.match(token_ids[:-1])
        if match.num_host_tokens and rng.random() < 0.9:
            match = self.load_back(match, rng.choice([0, 10_000]))
        cache.lock(match.node)
        num_new = -(-len(token_ids) // group.page_size) - len(match.pages)
        if rng.random() < 0.3 and not cache.reclaim(num_new):
            cache.unlock(match.node)  # waits for the write-backs
            self.step(token_ids, match)
            return
        new = cache.device.alloc(num_new, match.pages[-1] if match.pages else None)
        if new is None:
            cache.unlock(match.node)
            self.step(token_ids, match)  # what was loaded for it is still issued
            return
        cache.use(match)
        group.poison(new)
        if rng.random() < 0.1:  # gone before its first step
            cache.device.free(new)
            cache.unlock(match.node)
            return
        self.step(token_ids, match)
        pages = match.pages + new
        group.write(token_ids, pages, len(match.pages))
        self.running.append(Running(token_ids, pages, match.node, match.num_tokens))

    def load_back(self, match: Match, quota: int) -> Match:
        before = self.cache.device.locked_pages
        found = self.cache.load_back(match, mem_quota=quota, threshold=self.rng.choice([1, 1, 4]))
        if not isinstance(found, LoadedBack):
            assert self.cache.device.locked_pages == before
            return match
        assert found.match.num_tokens == match.num_tokens + match.num_host_tokens
        self.group.poison(found.item.device_pages)
        return found.match

    def step(self, token_ids: list[int], match: Match) -> None:
        self.group.start()
        if self.rng.random() < 0.5:
            self.group.advance_some(self.rng)
        self.group.forward(token_ids, match.pages)

    def keep(self) -> None:
        if self.running:
            self.insert(self.rng.choice(self.running))

    def insert(self, request: Running) -> None:
        cache, size = self.cache, self.group.page_size
        end = self.rng.randint(request.num_tree, len(request.token_ids))
        first = request.num_tree // size
        inserted = cache.insert(
            request.token_ids[request.num_tree : end], request.pages[first:], after=request.node
        )
        cache.lock(inserted.node)
        cache.unlock(request.node)
        cache.device.free(inserted.duplicates)
        request.node = inserted.node
        request.pages[first : first + len(inserted.pages)] = inserted.pages
        request.num_tree += len(inserted.pages) * size

    def finish(self) -> None:
        if self.running:
            request = self.rng.choice(self.running)
            self.insert(request)
            self.leave(request)

    def abort(self) -> None:
        if self.running:
            self.leave(self.rng.choice(self.running))

    def leave(self, request: Running) -> None:
        own = request.pages[request.num_tree // self.group.page_size :]
        self.cache.device.free(own)
        self.group.poison(own)
        self.cache.unlock(request.node)
        self.running.remove(request)

    def evict(self) -> None:
        self.cache.device.evict(self.rng.randint(0, 4))

    def pin(self) -> None:
        """And time passes."""
        self.group.now += 1
        self.check_pins()
        if self.running:
            request, num_s = self.rng.choice(self.running), self.rng.randint(1, 5)
            prefix = tuple(request.token_ids[: request.num_tree])
            if self.cache.pin(request.node, num_s):
                self.pinned[prefix] = max(self.pinned.get(prefix, 0), self.group.now + num_s)

    def check_pins(self) -> None:
        """What is pinned is in one tier or the other, and half of either is enough for it."""
        for prefix, until in self.pinned.items():
            if until > self.group.now:
                match = self.cache.match(prefix)
                assert match.num_tokens + match.num_host_tokens == len(prefix)
        most = min(self.cache.device.total_pages, self.cache.total_host_pages) // 2
        assert self.cache.pinned_pages <= most

    def reclaim(self) -> None:
        if self.cache._backups.policy == "write_back":
            self.cache.reclaim(self.rng.randint(0, 6))

    def copy(self) -> None:
        self.group.advance_some(self.rng)

    def report(self) -> None:
        self.group.collect()
        self.group.deliver(self.rng.randint(0, len(self.group.reports)), self.rng)

    def check_locks(self) -> None:
        """A node has the locks of those below it, of requests and of copies, and no other."""
        held: dict[int, int] = {}
        owners = [request.node for request in self.running]
        owners += list(self.cache._backups._held)
        owners += [under_way.node for under_way in self.cache._under_way.all()]
        for owner in owners:
            for node in self.cache._tree.path(owner):
                held[node.serial] = held.get(node.serial, 0) + 1
        assert held == {n.serial: n.locks for n in self.cache._tree.nodes() if n.locks}

    def end(self) -> None:
        """Everybody leaves, all copies end, everything is forgotten."""
        cache, group = self.cache, self.group
        self.check_pins()
        assert cache.drop_pins() == (cache.counts["pins_dropped"] > 0)
        assert cache.pinned_pages == 0
        while self.running:
            self.leave(self.running[0])
        while cache.num_under_way or group.start():
            group.settle()
            group.check()
        assert group.num_reports == dict.fromkeys(group.num_reports, group.size)
        for policy_kind in ("backups", "load_backs"):
            started, ended = (cache.counts[f"{policy_kind}_{w}"] for w in ("started", "finished"))
            assert started == ended
        assert (
            len(group.num_reports)
            == cache.counts["backups_started"] + cache.counts["load_backs_started"]
        )
        assert cache.device.locked_pages == 0 and cache.device.held_pages == 0
        cache.reset()
        cache.check()
        assert cache.device.free_pages == cache.device.total_pages
        assert cache.free_host_pages == cache.total_host_pages


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("size", "pages", "host_pages", "geometry"),
    [(1, 12, 13, DSA), (2, 6, 7, DSA), (2, 6, 7, GQA), (4, 4, 5, MLA), (4, 3, 2, DSA)],
)
def test_thousands_of_steps(
    policy: WritePolicy, size: int, pages: int, host_pages: int, geometry: KVGeometry
) -> None:
    group = Group(size=size, pages=pages, host_pages=host_pages, geometry=geometry, policy=policy)
    trace = Trace(random.Random(f"{policy}{size}{pages}"), group)
    trace.run(800)
    counts = group.cache.counts
    happened = ["backups_finished", "load_backs_finished", "load_backs_skipped_quota"]
    happened += ["pins_made", "pins_expired"]
    happened += ["load_backs_skipped_threshold", "evicted_device_pages", "evicted_host_pages"]
    assert not [name for name in happened if not counts[name]], counts
    trace.end()


@given(
    rng=st.randoms(use_true_random=False),
    size=st.sampled_from([1, 2, 4]),
    pages=st.integers(3, 8),
    host_pages=st.integers(1, 9),
    page_size=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    geometry=st.sampled_from([DSA, FP8, MLA, GQA]),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_short_trace(
    rng: random.Random,
    size: int,
    pages: int,
    host_pages: int,
    page_size: int,
    policy: WritePolicy,
    geometry: KVGeometry,
) -> None:
    group = Group(
        size=size,
        pages=pages,
        host_pages=host_pages,
        page_size=page_size,
        geometry=geometry,
        policy=policy,
    )
    trace = Trace(rng, group)
    trace.run(40)
    trace.end()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_with_real_copy_threads(size: int) -> None:
    group = Group(size=size, pages=12 // size, host_pages=14 // size, copier_class=ThreadCopier)
    trace = Trace(random.Random(size), group)
    trace.run(800)
    assert group.cache.counts["load_backs_finished"] and group.cache.counts["backups_finished"]
    trace.end()
    group.close()


class AnyPage(TieredCache):
    """The fault: a load-back takes whatever device pages it can get."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device.alloc_beside = lambda host_pages: self.device.alloc(len(host_pages))


class AnyPageUnchecked(AnyPage):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._under_way._check_lanes = lambda item: None


class Unchecked(HostTier):
    """Copies what it owns on the host to wherever the same row page is here."""

    def start(self, item: HostItem) -> None:
        layout = self._pool.layout
        record = CpHiCacheNodeMetadata.of(item.host_pages, layout)
        device = torch.tensor(item.device_pages)[record.owned_positions]
        rows = layout.row_page(device), record.host_indices
        if len(device) and isinstance(item, LoadBack):
            for layers in self._steps:
                self._load_layers(layers, *rows)
        elif len(device):
            self._back_up(*rows)
        self._acknowledged.append(item.id)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("cache_class", "tier_class", "error", "message"),
    [
        (AnyPage, HostTier, AssertionError, "lie on different ranks"),
        (AnyPageUnchecked, HostTier, ValueError, "must have the owner of its host page"),
        (AnyPageUnchecked, Unchecked, AssertionError, "page"),
    ],
    ids=["the leader", "each rank", "the bytes"],
)
def test_a_load_back_into_any_free_page_is_caught(
    size: int,
    cache_class: type[TieredCache],
    tier_class: type[HostTier],
    error: type[Exception],
    message: str,
) -> None:
    """By the leader; without its check by every rank; and without theirs by the bytes."""
    group = Group(size=size, pages=6, host_pages=7, cache_class=cache_class, tier_class=tier_class)
    with pytest.raises(error, match=message):
        Trace(random.Random(size), group).run(800)


@pytest.mark.parametrize("size", [2, 4])
def test_the_unchecked_ranks_of_that_test_are_right_otherwise(size: int) -> None:
    trace = Trace(
        random.Random(size), Group(size=size, pages=6, host_pages=7, tier_class=Unchecked)
    )
    trace.run(800)
    trace.end()
