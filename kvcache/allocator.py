"""Which logical pages are free, by lane. A lane is the pages that one rank owns.

Owns the free lists; knows no request, no tree and no row. Host integers only, deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence


def lane_of_page(page: int, num_lanes: int) -> int:
    """The lane of `page` (>= 1): the rank that owns it. Page 0, the dummy, is in no lane."""
    return (page - 1) % num_lanes


def count_lanes(pages: Sequence[int], num_lanes: int) -> list[int]:
    """How many of `pages` lie in each lane, [num_lanes]."""
    if num_lanes == 1:
        return [len(pages)]
    counts = [0] * num_lanes
    for page in pages:
        counts[(page - 1) % num_lanes] += 1
    return counts


def count_tail(pages: Sequence[int], missing: Sequence[int]) -> tuple[int, list[int]]:
    """How many of `pages` go, from the last on, until missing[lane] of each lane have gone or none
    is left; and what is missing then, [num_lanes]."""
    missing, num_pages = list(missing), 0
    while any(missing) and num_pages < len(pages):
        num_pages += 1
        lane = lane_of_page(pages[-num_pages], len(missing))
        missing[lane] = max(0, missing[lane] - 1)
    return num_pages, missing


class CPSharedPagedAllocator:
    """Pages 1 .. num_pages_per_lane * cp_size in cp_size lanes, dealt cyclically.

    A page is free (may be handed out), released (freed, and merged into its lane's free list when
    an allocation would fail without it) or held. Accounts are `*_pages` in pages and `*_size` in
    tokens. Cyclic dealing is for balance only; the owner of a page is read from its number.
    """

    def __init__(self, num_pages_per_lane: int, page_size: int, cp_size: int = 1) -> None:
        if num_pages_per_lane <= 0:
            raise ValueError(f"num_pages_per_lane must be positive, got {num_pages_per_lane}")
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size}")
        if cp_size <= 0:
            raise ValueError(f"cp_size must be positive, got {cp_size}")
        self.page_size = page_size
        self.num_lanes = cp_size
        self.pages_per_lane = num_pages_per_lane
        self.total_pages = num_pages_per_lane * cp_size
        # Descending, so that the smallest page is handed out first, from the end of the list.
        self._free = [
            list(range(self.total_pages - cp_size + 1 + i, 0, -cp_size)) for i in self._lanes
        ]
        self._num_allocs = 0
        self._released: list[list[int]] = [[] for _ in self._lanes]
        self._held = bytearray(self.total_pages + 1)  # by page: 1 where held

    @property
    def _lanes(self) -> range:
        return range(self.num_lanes)

    @property
    def free_pages(self) -> int:
        return sum(map(len, self._free))

    @property
    def release_pages(self) -> int:
        return sum(map(len, self._released))

    @property
    def available_pages(self) -> int:
        return self.free_pages + self.release_pages

    @property
    def held_pages(self) -> int:
        return self.total_pages - self.available_pages

    @property
    def free_size(self) -> int:
        return self.free_pages * self.page_size

    @property
    def release_size(self) -> int:
        return self.release_pages * self.page_size

    @property
    def available_size(self) -> int:
        return self.available_pages * self.page_size

    @property
    def smallest_lane_pages(self) -> int:
        """Available pages of the lane that has the fewest."""
        return min(self.available_by_lane())

    @property
    def obtainable_pages(self) -> int:
        """What a cyclic allocation is sure to get, wherever it starts. Admission counts with this,
        not with available_pages."""
        return self.smallest_lane_pages * self.num_lanes

    def available_by_lane(self) -> list[int]:
        return [
            len(free) + len(released)
            for free, released in zip(self._free, self._released, strict=True)
        ]

    def is_held(self, page: int) -> bool:
        return 0 < page <= self.total_pages and self._held[page] == 1

    def allocator_state_str(self) -> str:
        return (
            f"allocator_available_size={self.available_size} "
            f"(allocator_free_size={self.free_size} [free_pages={self.free_pages}] + "
            f"allocator_release_size={self.release_size} [release_pages={self.release_pages}])"
        )

    def lane_after(self, page: int | None) -> int:
        """Where a request whose last page is `page` goes on; the fullest lane where it has none,
        equally full ones in turn: the first pages of requests stay cached longest."""
        if page is not None:
            return (lane_of_page(page, self.num_lanes) + 1) % self.num_lanes
        available = self.available_by_lane()
        turn = self._num_allocs % self.num_lanes
        return max(
            self._lanes, key=lambda lane: (available[lane], -((lane - turn) % self.num_lanes))
        )

    def needs_by_lane(self, num_pages: int, start_lane: int) -> list[int]:
        """How many pages `alloc(num_pages, start_lane)` takes from each lane."""
        rounds, extra = divmod(num_pages, self.num_lanes)
        return [rounds + ((lane - start_lane) % self.num_lanes < extra) for lane in self._lanes]

    def alloc(self, num_pages: int, start_lane: int | None = None) -> list[int] | None:
        """`num_pages` pages, lane by lane from `start_lane` on (None: the fullest lane). None, and
        nothing has changed, where a lane has too few. ValueError for a negative number or a lane
        that is not there."""
        if num_pages < 0:
            raise ValueError(f"num_pages must be at least 0, got {num_pages}")
        start = self.lane_after(None) if start_lane is None else self._checked_lane(start_lane)
        needs = self.needs_by_lane(num_pages, start)
        if not self._reserve(needs):
            return None
        self._num_allocs += 1
        pages = [0] * num_pages
        for lane, need in enumerate(needs):
            if need:
                pages[(lane - start) % self.num_lanes :: self.num_lanes] = self._take(lane, need)
        return pages

    def alloc_lanes(self, lanes: Sequence[int]) -> list[int] | None:
        """One page a wanted lane: page i lies in lanes[i]. None, and nothing has changed, where a
        lane has too few. ValueError for a lane that is not there."""
        needs = [0] * self.num_lanes
        for lane in lanes:
            needs[self._checked_lane(lane)] += 1
        if not self._reserve(needs):
            return None
        taken = [iter(self._take(lane, need)) for lane, need in enumerate(needs)]
        return [next(taken[lane]) for lane in lanes]

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; they serve allocations from now on. ValueError, and nothing has changed,
        where a page is not held or is named twice."""
        for page in pages:
            if not self.is_held(page):
                raise ValueError(
                    f"page {page} is not held: free takes pages of alloc, each once "
                    f"(pages are 1 to {self.total_pages})"
                )
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is named twice in free({list(pages)})")
        for page in pages:
            self._held[page] = 0
            self._released[(page - 1) % self.num_lanes].append(page)

    def check(self) -> None:
        """AssertionError unless every page is in exactly one place, and in its own lane."""
        seen: set[int] = set()
        for lane in self._lanes:
            pages = self._free[lane] + self._released[lane]
            foreign = [page for page in pages if lane_of_page(page, self.num_lanes) != lane]
            if foreign or not seen.isdisjoint(pages) or len(set(pages)) != len(pages):
                raise AssertionError(f"lane {lane} has foreign or repeated pages: {pages}")
            seen.update(pages)
        held = {page for page in range(self.total_pages + 1) if self._held[page]}
        if seen & held or seen | held != set(range(1, self.total_pages + 1)):
            raise AssertionError(f"pages lost or in two places: {self.allocator_state_str()}")

    def _checked_lane(self, lane: int) -> int:
        if not 0 <= lane < self.num_lanes:
            raise ValueError(f"lane must be in [0, {self.num_lanes}), got {lane}")
        return lane

    def _reserve(self, needs: list[int]) -> bool:
        """Make the free lists hold `needs`, merging released pages where they would fall short."""
        if any(need > have for need, have in zip(needs, self.available_by_lane(), strict=True)):
            return False
        for need, free, released in zip(needs, self._free, self._released, strict=True):
            if need > len(free):  # so the free list is short, and sorting it is cheap
                free.extend(released)
                free.sort(reverse=True)
                released.clear()
        return True

    def _take(self, lane: int, num_pages: int) -> list[int]:
        free = self._free[lane]
        cut = len(free) - num_pages
        pages = free[cut:][::-1]
        del free[cut:]
        for page in pages:
            self._held[page] = 1
        return pages
