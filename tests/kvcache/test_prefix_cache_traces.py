"""Random traces of requests over the prefix cache, against a dict of prefixes as the model.

The model knows every cached prefix of whole pages by its tokens: its last page and when it was last
used. It evicts page by page: the prefix used longest ago that nothing extends or locks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.allocator import CPSharedPagedAllocator, count_lanes
from kvcache.prefix_cache import Node, PrefixCache

Prefix = tuple[int, ...]


@dataclass
class ModelPage:
    page: int
    tick: int


@dataclass
class Running:
    token_ids: list[int]
    pages: list[int]
    node: Node
    num_locked: int  # tokens


class Model:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cached: dict[Prefix, ModelPage] = {}
        self._clock = 0

    def prefixes(self, token_ids: list[int]) -> list[Prefix]:
        size = self.page_size
        return [tuple(token_ids[:end]) for end in range(size, len(token_ids) + 1, size)]

    def use(self, prefixes: list[Prefix]) -> None:
        self._clock += 1
        for prefix in prefixes:
            self.cached[prefix].tick = self._clock

    def match(self, token_ids: list[int]) -> list[int]:
        found = [prefix for prefix in self.prefixes(token_ids) if prefix in self.cached]
        self.use(found)
        return [self.cached[prefix].page for prefix in found]

    def insert(self, token_ids: list[int], pages: list[int]) -> tuple[int, list[int]]:
        prefixes = self.prefixes(token_ids)
        num_existing = sum(prefix in self.cached for prefix in prefixes)
        for prefix, page in zip(prefixes, pages, strict=False):
            self.cached.setdefault(prefix, ModelPage(page, 0))
        self.use(prefixes)
        return num_existing * self.page_size, [self.cached[prefix].page for prefix in prefixes]

    def evict_one(self, locked: set[Prefix]) -> int | None:
        extended = {prefix[: -self.page_size] for prefix in self.cached}
        leaves = [p for p in self.cached if p not in extended and p not in locked]
        if not leaves:
            return None
        oldest = min(leaves, key=lambda prefix: self.cached[prefix].tick)
        return self.cached.pop(oldest).page


class Traces(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.running: list[Running] = []

    @initialize(
        cp_size=st.sampled_from([1, 2, 4]), pages=st.integers(1, 5), page_size=st.integers(1, 3)
    )
    def start(self, cp_size: int, pages: int, page_size: int) -> None:
        self.cp_size = cp_size
        self.pages_per_lane = pages if cp_size > 1 else 3 * pages
        self.allocator = CPSharedPagedAllocator(self.pages_per_lane, page_size, cp_size)
        self.cache = PrefixCache(self.allocator)
        self.model = Model(page_size)

    def locked(self) -> set[Prefix]:
        prefixes: set[Prefix] = set()
        for request in self.running:
            prefixes.update(self.model.prefixes(request.token_ids[: request.num_locked]))
        return prefixes

    def own(self, request: Running) -> list[int]:
        return request.pages[request.num_locked // self.model.page_size :]

    def free_by_lane(self) -> list[int]:
        used = [entry.page for entry in self.model.cached.values()]
        used += [page for request in self.running for page in self.own(request)]
        return [self.pages_per_lane - count for count in count_lanes(used, self.cp_size)]

    def alloc(self, num_pages: int, after_page: int | None, also_locked: set[Prefix]) -> list[int]:
        """cache.device.alloc, checked against the model; [] where it gave None."""
        locked = self.locked() | also_locked
        free = self.free_by_lane()
        evictable = count_lanes(
            [e.page for prefix, e in self.model.cached.items() if prefix not in locked],
            self.cp_size,
        )
        most = [a + b for a, b in zip(free, evictable, strict=True)]
        assert self.cache.device.obtainable_pages == min(most) * self.cp_size
        pages = self.cache.device.alloc(num_pages, after_page)
        if pages is None:
            assert num_pages > sum(most)
            return []
        assert len(set(pages)) == len(pages) == num_pages
        lanes = [(page - 1) % self.cp_size for page in pages]
        assert all(lanes.count(lane) <= most[lane] for lane in range(self.cp_size))
        # In turn from the lane after the last page, or from a fullest one, unless that cannot be.
        first = most.index(max(most)) if after_page is None else after_page % self.cp_size
        in_turn = [(first + i) % self.cp_size for i in range(num_pages)]
        if all(in_turn.count(lane) <= most[lane] for lane in range(self.cp_size)):
            begin = lanes[0] if after_page is None else first
            assert lanes == [(begin + i) % self.cp_size for i in range(num_pages)]
        missing = [lanes.count(lane) - free[lane] for lane in range(self.cp_size)]
        while max(missing) > 0:
            evicted = self.model.evict_one(locked)
            assert evicted is not None
            missing[(evicted - 1) % self.cp_size] -= 1
        return pages

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, data: st.DataObject, tokens: list[int]) -> None:
        if self.model.cached and data.draw(st.booleans(), label="continues a cached prefix"):
            tokens = [*data.draw(st.sampled_from(sorted(self.model.cached))), *tokens]
        match = self.cache.match(tokens[:-1])
        assert match.pages == self.model.match(tokens[:-1])
        assert match.num_tokens == len(match.pages) * self.model.page_size
        self.cache.lock(match.node)
        num_new = -(-len(tokens) // self.model.page_size) - len(match.pages)
        locked = set(self.model.prefixes(tokens[: match.num_tokens]))
        pages = self.alloc(num_new, match.pages[-1] if match.pages else None, locked)
        if pages:
            request = Running(tokens, match.pages + pages, match.node, match.num_tokens)
            self.running.append(request)
        else:
            self.cache.unlock(match.node)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running), label="request")
        pages = self.alloc(1, request.pages[-1], set())
        if pages:
            request.pages += pages
            room = len(request.pages) * self.model.page_size
            request.token_ids += [1] * (room - len(request.token_ids))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), continues=st.booleans())
    def keep(self, data: st.DataObject, continues: bool) -> None:
        """Insert what a request has computed so far, from the start or after its locked node."""
        request = data.draw(st.sampled_from(self.running), label="request")
        done = request.num_locked
        end = data.draw(st.integers(done, len(request.token_ids)), label="computed tokens")
        num_existing, pages = self.model.insert(request.token_ids[:end], request.pages)
        if continues:
            skipped = done // self.model.page_size
            inserted = self.cache.insert(
                request.token_ids[done:end], request.pages[skipped:], after=request.node
            )
            assert inserted.num_existing_tokens == num_existing - done
            assert inserted.pages == pages[skipped:]
        else:
            inserted = self.cache.insert(request.token_ids[:end], request.pages)
            assert (inserted.num_existing_tokens, inserted.pages) == (num_existing, pages)
        self.cache.lock(inserted.node)
        self.cache.unlock(request.node)
        request.node = inserted.node
        replaced = [own for own, kept in zip(request.pages, pages, strict=False) if own != kept]
        assert inserted.duplicates == replaced
        self.cache.device.free(replaced)
        request.pages[: len(pages)] = pages
        request.num_locked = len(pages) * self.model.page_size

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running), label="request")
        self.cache.device.free(self.own(request))
        self.cache.unlock(request.node)
        self.running.remove(request)

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        locked = self.locked()
        expected = 0
        while expected < num_pages and self.model.evict_one(locked) is not None:
            expected += 1
        assert self.cache.device.evict(num_pages) == expected

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        cached = {entry.page for entry in self.model.cached.values()}
        own = {page for request in self.running for page in self.own(request)}
        is_held = self.allocator.is_held
        total = self.cache.device.total_pages
        assert {page for page in range(1, total + 1) if is_held(page)} == cached | own
        assert cached.isdisjoint(own)
        assert self.allocator.available_by_lane() == self.free_by_lane()
        num_locked = len(self.locked())
        assert self.cache.device.locked_pages == num_locked
        assert self.cache.device.evictable_pages == len(cached) - num_locked
        assert self.cache.device.held_pages == len(own)
        assert self.cache.device.free_pages + len(own) + len(cached) == total

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for prefix in sorted(self.model.cached):
            assert self.cache.match(list(prefix)).pages == self.model.match(list(prefix))
        for request in self.running:
            self.cache.device.free(self.own(request))
            self.cache.unlock(request.node)
        self.cache.reset()
        self.cache.check()
        assert self.cache.device.free_pages == self.cache.device.total_pages


Traces.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTraces = Traces.TestCase
