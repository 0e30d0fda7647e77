"""A group of ranks in one process with a leader's cache over two tiers, real bytes, and copies that
run when the test says so. What a page must hold follows from the tokens up to its end."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from kvcache.allocator import CPSharedPagedAllocator, lane_of_page
from kvcache.events import EventLog, page_hashes
from kvcache.host_copies import Lane, Step, ThreadCopier
from kvcache.host_plan import Backup, HostOrders, LoadBack, WritePolicy
from kvcache.host_tier import HostTier
from kvcache.layout import KVGeometry
from kvcache.pool import KVPool
from kvcache.tiered_cache import TieredCache

SALT = b"test"
DSA = KVGeometry(num_layers=3, latent_dim=5, index_dim=3, index_layers=(0, 2))
FP8 = KVGeometry(num_layers=3, latent_dim=5, index_dim=16, index_layers=(0, 2), fp8_index_keys=True)
MLA = KVGeometry(num_layers=2, latent_dim=4)
GQA = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=3)


class ManualCopy:
    """Steps that run one by one when told to, or when somebody waits for them."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.num_run = 0
        self.before: Callable[[], None] = lambda: None  # earlier copies of the lane
        self.seconds = 0.0

    def advance(self, num_steps: int) -> None:
        if num_steps > self.num_run:
            self.before()
        while self.num_run < num_steps:
            self.steps[self.num_run]()
            self.num_run += 1

    def wait_step(self, index: int) -> None:
        self.advance(index + 1)

    def is_done(self) -> bool:
        return self.num_run == len(self.steps)

    def wait(self) -> None:
        self.advance(len(self.steps))


class ManualCopier:
    """Copies of one lane run in the order of their starting; nothing runs by itself."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, list[ManualCopy]] = {"out": [], "in": []}

    def start(self, lane: Lane, steps: Sequence[Step]) -> ManualCopy:
        copy, earlier = ManualCopy(steps), list(self.unfinished(lane))
        copy.before = lambda: [c.advance(len(c.steps)) for c in earlier] and None
        self.lanes[lane].append(copy)
        return copy

    def unfinished(self, lane: Lane) -> list[ManualCopy]:
        self.lanes[lane] = [copy for copy in self.lanes[lane] if not copy.is_done()]
        return self.lanes[lane]

    def advance_some(self, rng: random.Random) -> None:
        for lane in self.lanes:
            for copy in self.unfinished(lane)[: rng.randrange(3)]:
                copy.advance(rng.randint(0, len(copy.steps)))

    def close(self) -> None:
        for lane in self.lanes:
            for copy in self.unfinished(lane):
                copy.advance(len(copy.steps))


@dataclass
class Rank:
    pool: KVPool
    tier: HostTier
    copier: ManualCopier | ThreadCopier
    pages: list[np.ndarray] = field(default_factory=list)  # of each buffer: [layers, pages, bytes]

    def __post_init__(self) -> None:
        for buffer in self.pool.buffers():
            flat = buffer.view(torch.uint8).view(len(buffer), self.pool.num_pages + 1, -1)
            self.pages.append(flat.numpy())

    def write(self, row_page: int, data: bytes) -> None:
        at = 0
        for pages in self.pages:
            part = pages[:, row_page]
            part[...] = np.frombuffer(data[at : at + part.size], np.uint8).reshape(part.shape)
            at += part.size

    def read(self, row_page: int) -> bytes:
        return b"".join(pages[:, row_page].tobytes() for pages in self.pages)

    def read_layer(self, row_page: int, layer: int) -> bytes:
        places = self.pool.layer_buffers(layer)
        return b"".join(self.pages[buffer][place, row_page].tobytes() for buffer, place in places)

    def layer_of(self, data: bytes, layer: int) -> bytes:
        """The part of a page's bytes that belongs to `layer`."""
        found, at = {}, 0
        for buffer, pages in enumerate(self.pages):
            size = pages.shape[2]
            for place in range(len(pages)):
                found[buffer, place] = data[at : at + size]
                at += size
        return b"".join(found[place] for place in self.pool.layer_buffers(layer))


class Group:
    def __init__(
        self,
        *,
        size: int = 1,
        pages: int = 6,  # of a rank
        host_pages: int = 8,
        page_size: int = 2,
        geometry: KVGeometry = DSA,
        policy: WritePolicy = "write_through",
        cache_class: type[TieredCache] = TieredCache,
        tier_class: type[HostTier] = HostTier,
        copier_class: type[ManualCopier] | type[ThreadCopier] = ManualCopier,
    ) -> None:
        self.size, self.page_size = size, page_size
        self.now = 0  # seconds, by the cache's clock
        self.cache = cache_class(
            CPSharedPagedAllocator(pages, page_size, size),
            CPSharedPagedAllocator(host_pages, page_size, size),
            policy=policy,
            events=EventLog(SALT),
            clock=lambda: self.now,
        )
        self.ranks: list[Rank] = []
        for rank in range(size):
            pool = KVPool.create(
                geometry, page_size, pages, torch.bfloat16, cp_size=size, cp_rank=rank
            )
            copier = copier_class()
            self.ranks.append(Rank(pool, tier_class(pool, host_pages, copier), copier))
        self.page_bytes = self.ranks[0].tier.page_bytes
        self.reports: list[tuple[int, int]] = []  # (item, rank), not delivered yet
        self.num_reports: dict[int, int] = {}
        self._expected: dict[bytes, bytes] = {}

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        return page_hashes(token_ids, self.page_size, SALT)

    def expected(self, page_hash: bytes) -> bytes:
        if page_hash not in self._expected:
            self._expected[page_hash] = hashlib.shake_256(page_hash).digest(self.page_bytes)
        return self._expected[page_hash]

    def place(self, page: int) -> tuple[Rank, int]:
        """Owner and row page, by the definition of the layout."""
        return self.ranks[lane_of_page(page, self.size)], (page - 1) // self.size + 1

    def poison(self, pages: Sequence[int]) -> None:
        """Pages allocated anew may be written at once: whoever still reads them is wrong."""
        for page in pages:
            rank, row_page = self.place(page)
            rank.write(row_page, b"\xa5" * self.page_bytes)

    def write(self, token_ids: Sequence[int], pages: Sequence[int], first: int = 0) -> None:
        """What a forward leaves in the full pages of `token_ids` from page `first` on."""
        for page, page_hash in list(zip(pages, self.hashes(token_ids), strict=False))[first:]:
            rank, row_page = self.place(page)
            rank.write(row_page, self.expected(page_hash))

    def start(self) -> HostOrders:
        """Give the ranks the orders that are due, as they come over a wire."""
        orders = self.cache.take_orders()
        wire = msgspec.msgpack.encode(orders)
        for rank in self.ranks:
            received = msgspec.msgpack.decode(wire, type=HostOrders)
            for item in (*received.load_backs, *received.backups):
                rank.tier.start(item)
        return orders

    def forward(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Read a context layer by layer, as attention does, and compare it."""
        for layer in range(self.ranks[0].pool.geometry.num_layers):
            for rank in self.ranks:
                rank.tier.wait_layer(layer)
            for page, page_hash in zip(pages, self.hashes(token_ids), strict=False):
                rank, row_page = self.place(page)
                want = rank.layer_of(self.expected(page_hash), layer)
                assert rank.read_layer(row_page, layer) == want, f"page {page}, layer {layer}"

    def collect(self) -> None:
        for number, rank in enumerate(self.ranks):
            for item in rank.tier.poll():
                self.reports.append((item, number))
                self.num_reports[item] = self.num_reports.get(item, 0) + 1

    def advance_some(self, rng: random.Random) -> None:
        """Let some copies run on, on some ranks; threads run by themselves."""
        for rank in self.ranks:
            if isinstance(rank.copier, ManualCopier) and rng.random() < 0.7:
                rank.copier.advance_some(rng)

    def settle(self) -> None:
        """Run everything to its end and deliver all reports."""
        self.start()
        for rank in self.ranks:
            for running in rank.tier._running:
                is_load_back = isinstance(running.item, LoadBack)
                running.copy.wait_step(rank.pool.geometry.num_layers - 1 if is_load_back else 0)
        self.collect()
        self.deliver(len(self.reports))

    def close(self) -> None:
        for rank in self.ranks:
            rank.tier.close()

    def deliver(self, num_reports: int, rng: random.Random | None = None) -> None:
        if rng is not None:
            rng.shuffle(self.reports)
        for item, rank in self.reports[:num_reports]:
            self.cache.acknowledge(item, rank)
        del self.reports[:num_reports]

    def check(self) -> None:
        """All accounts, and every byte of what no copy is about to write."""
        self.cache.check()
        items = self.cache.items_under_way
        loading = {p for i in items if isinstance(i, LoadBack) for p in i.device_pages}
        saving = {p for i in items if isinstance(i, Backup) for p in i.host_pages}
        for node in self.cache._tree.nodes():
            for page, page_hash in zip(node.pages, node.hashes, strict=False):
                if page not in loading:
                    rank, row_page = self.place(page)
                    assert rank.read(row_page) == self.expected(page_hash), f"device page {page}"
            for page, page_hash in zip(node.host_pages, node.hashes, strict=False):
                if page not in saving:
                    rank, row_page = self.place(page)
                    data = rank.tier.object(row_page).numpy().tobytes()
                    assert data == self.expected(page_hash), f"host page {page}"
