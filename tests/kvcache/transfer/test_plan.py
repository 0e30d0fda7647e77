"""Which bytes go where, against copying page by page."""

from __future__ import annotations

import ctypes
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.transfer.base import Write, Writes
from kvcache.transfer.digest import page_digest
from kvcache.transfer.plan import plan_writes
from kvcache.transfer.record import BufferRecord, PoolRecord
from tests.kvcache.transfer.pools import DSA, GEOMETRIES, MLA, contents, random_pool

NUM_PAGES = 9


@st.composite
def page_lists(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    pages = st.permutations(range(1, NUM_PAGES + 1))
    count = draw(st.integers(0, NUM_PAGES))
    return draw(pages)[:count], draw(pages)[:count]


@given(name=st.sampled_from(sorted(GEOMETRIES)), lists=page_lists())
def test_the_writes_copy_the_pages_and_nothing_else(
    name: str, lists: tuple[list[int], list[int]]
) -> None:
    ours = random_pool(GEOMETRIES[name], NUM_PAGES, 1)
    theirs = random_pool(GEOMETRIES[name], NUM_PAGES, 2)
    source, destination = lists
    want = contents(theirs)
    for here, there in zip(source, destination, strict=True):
        want[there] = contents(ours)[here]
    for write in plan_writes(ours.record(), theirs.record(), source, destination):
        ctypes.memmove(write.destination, write.source, write.num_bytes)
    assert contents(theirs) == want


@given(lists=page_lists())
def test_adjacent_pages_are_one_write(lists: tuple[list[int], list[int]]) -> None:
    """As few writes as pages that follow no other on both sides, in each buffer and layer."""
    pool = random_pool(DSA, NUM_PAGES, 1)
    pairs = set(zip(*lists, strict=True))
    num_runs = sum((here - 1, there - 1) not in pairs for here, there in pairs)
    writes = plan_writes(pool.record(), pool.record(), *lists)
    assert len(writes) == num_runs * (3 + 2)
    assert writes.total_bytes == len(pairs) * pool.record().page_bytes


@given(lists=page_lists())
def test_no_byte_is_written_twice(lists: tuple[list[int], list[int]]) -> None:
    record = random_pool(DSA, NUM_PAGES, 1).record()
    spans = sorted(
        (write.destination, write.destination + write.num_bytes)
        for write in plan_writes(record, record, *lists)
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_addresses_by_hand() -> None:
    """Two layers of 10 pages of 8 bytes at 1000 (there: of 20 pages at 5000)."""

    def record(address: int, num_pages: int) -> PoolRecord:
        buffer = BufferRecord(
            name="latent",
            dtype="int8",
            address=address,
            num_layers=2,
            layer_bytes=8 * num_pages,
            page_bytes=8,
        )
        return PoolRecord(page_size=4, num_row_pages=num_pages, buffers=(buffer,))

    writes = plan_writes(record(1000, 10), record(5000, 20), [4, 2, 3], [9, 11, 12])
    assert list(writes) == [
        Write(1016, 5088, 16),
        Write(1032, 5072, 8),
        Write(1096, 5248, 16),
        Write(1112, 5232, 8),
    ]
    assert writes[1] == Write(1032, 5072, 8)
    assert isinstance(writes[1:3], Writes)
    assert list(writes[1:3]) == list(writes)[1:3]


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ([1, 0], [1, 2], "our row page 0 is outside the pool; accepted: 1 to 9"),
        ([10], [1], "our row page 10 is outside the pool; accepted: 1 to 9"),
        ([1], [6], "their row page 6 is outside the pool; accepted: 1 to 5"),
        ([1], [-1], "their row page -1 is outside the pool"),
        ([1, 2], [3, 3], "their row page 3 is wanted twice"),
        ([1, 2], [3], "as many pages must be given on both sides"),
    ],
)
def test_bad_pages(source: list[int], destination: list[int], message: str) -> None:
    ours, theirs = random_pool(MLA, 9, 1).record(), random_pool(MLA, 5, 2).record()
    with pytest.raises(ValueError, match=message):
        plan_writes(ours, theirs, source, destination)


def test_pools_that_differ() -> None:
    ours = random_pool(MLA, 9, 1).record()
    halves = tuple(msgspec.structs.replace(b, dtype="float16") for b in ours.buffers)
    for theirs in (
        random_pool(DSA, 9, 1).record(),
        msgspec.structs.replace(ours, buffers=halves),
        msgspec.structs.replace(ours, page_size=8),
    ):
        with pytest.raises(ValueError, match=r"the pools differ: here .* there "):
            plan_writes(ours, theirs, [1], [1])


def test_a_page_has_a_fingerprint() -> None:
    pool, other = random_pool(DSA, 3, 1), random_pool(DSA, 3, 2)
    digests = [page_digest(pool, row_page) for row_page in range(4)]
    assert len(set(digests)) == 4
    for buffer, source in zip(other.buffers(), pool.buffers(), strict=True):
        buffer.copy_(source)
    assert [page_digest(other, row_page) for row_page in range(4)] == digests
    other.buffers()[1][1, 3 * 4 - 1, 5] += 1  # the last index key of page 2
    assert [page_digest(other, row_page) == digests[row_page] for row_page in range(4)] == [
        True,
        True,
        False,
        True,
    ]
    with pytest.raises(ValueError, match="row page must be in 0 to 3, got 4"):
        page_digest(pool, 4)
