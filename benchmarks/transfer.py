"""Pages from one process to another on this machine: the pusher against the bare Mooncake engine
that is given the same writes.

    python -m benchmarks.transfer [--gib 0.25] [--rounds 7] [--json FILE]
                                  [--device cuda] [--protocol tcp|rdma|nvlink]

The gate comes first: every page must arrive, and no other may change. Prints a table. Exits with 1
where the gate fails or the pusher moves less than 0.8 of what the bare engine does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.handoff.pusher import Pusher
from engine.handoff.room import Reservation, RoomReport
from engine.types import ModelId
from kvcache.layout import KVGeometry
from kvcache.pool import KVPool
from kvcache.transfer.digest import page_digest
from kvcache.transfer.mooncake import PROTOCOLS, MooncakeEngine
from kvcache.transfer.plan import plan_writes, register_pool
from kvcache.transfer.record import PoolRecord
from kvcache.transfer.system import captured_stderr, load_engine_module

PAGE = 64
LEAST_RATIO = 0.8
CHUNK_PAGES = 32  # 2,048 tokens
RAW_BATCH = 1024  # requests; the bare engine fails beyond about 2,048
WAIT_S = 120.0
GEOMETRIES = {
    "default model": KVGeometry(
        num_layers=30, latent_dim=768, index_dim=256, index_layers=tuple(range(30))
    ),
    "DeepSeek-V3.2": KVGeometry(
        num_layers=61, latent_dim=576, index_dim=128, index_layers=tuple(range(61))
    ),
}


@dataclass
class Row:
    model: str
    device: str
    protocol: str
    pages: str  # contiguous or scattered
    num_pages: int
    num_writes: int
    mib: float
    raw_gb_s: float  # medians of all rounds
    pusher_gb_s: float
    ratio: float  # median of the rounds' ratios
    raw_cpu_s_per_gb: float  # of the sending process
    pusher_cpu_s_per_gb: float


@dataclass(frozen=True)
class Setting:
    model: str
    num_pages: int
    device: str
    protocol: str

    def pool(self, seed: int) -> KVPool:
        """Of random bits."""
        geometry = GEOMETRIES[self.model]
        pool = KVPool.create(geometry, PAGE, self.num_pages, torch.bfloat16, self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        for buffer in pool.buffers():
            buffer.view(torch.int16).random_(generator=generator)
        return pool


def receive(setting: Setting, pipe: Connection) -> None:
    """The decode worker's process: its memory, and digests of it on request."""
    pool = setting.pool(2)
    engine = MooncakeEngine(protocol=setting.protocol)
    register_pool(engine, pool.record())
    pipe.send((engine.session, pool.record()))
    while pipe.recv():
        pipe.send([page_digest(pool, row_page) for row_page in range(setting.num_pages + 1)])
    engine.close()


class Pair:
    """A sender with a pusher and a bare engine, and a receiver in another process."""

    def __init__(self, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=receive, args=(setting, other))
        self._process.start()
        self.pool = setting.pool(1)
        self._engine = MooncakeEngine(protocol=setting.protocol)
        register_pool(self._engine, self.pool.record())
        self._reports: queue.Queue[RoomReport] = queue.Queue()
        self._pusher = Pusher(self.pool, self._engine, 0, self._reports.put)
        self._bare: Any = load_engine_module().TransferEngine()
        with captured_stderr():
            code = self._bare.initialize("127.0.0.1", "P2PHANDSHAKE", setting.protocol, "")
        if code != 0:
            raise RuntimeError(f"the bare engine did not start: {code}")
        for buffer in self.pool.record().buffers:
            self._bare.register_memory(buffer.address, buffer.num_layers * buffer.layer_bytes)
        self.session: str
        self.record: PoolRecord
        self.session, self.record = self._pipe.recv()

    def digests(self) -> list[str]:
        self._pipe.send(True)
        found: list[str] = self._pipe.recv()
        return found

    def push(self, source: list[int], destination: list[int]) -> None:
        """One room, in chunks, as a prefill would send it."""
        reservation = Reservation(
            session=self.session,
            pool=self.record,
            model_id=ModelId(fingerprint="", dtype=""),
            first_position=0,
            dst_pages=destination,
        )
        self._pusher.open("room", reservation)
        for start in range(0, len(source), CHUNK_PAGES):
            end = min(start + CHUNK_PAGES, len(source))
            is_last = end == len(source)
            self._pusher.push("room", source[start:end], list(range(start, end)), is_last)
        report = self._reports.get(timeout=WAIT_S)
        if report.status != "done" or report.num_pages != len(source):
            raise RuntimeError(f"the push failed: {report}")

    def raw(self, source: list[int], destination: list[int]) -> None:
        """The same chunks, planned outside the clock."""
        for sources, destinations, sizes in self._planned:
            code = self._bare.batch_transfer_sync_write(self.session, sources, destinations, sizes)
            if code != 0:
                raise RuntimeError(f"the bare engine failed: {code}")

    def prepare_raw(self, source: list[int], destination: list[int]) -> int:
        """Plans what `raw` sends; the number of writes."""
        self._planned: list[tuple[list[int], list[int], list[int]]] = []
        for start in range(0, len(source), CHUNK_PAGES):
            end = start + CHUNK_PAGES
            writes = plan_writes(
                self.pool.record(), self.record, source[start:end], destination[start:end]
            )
            for first in range(0, len(writes), RAW_BATCH):
                part = writes[first : first + RAW_BATCH]
                columns = (part.sources, part.destinations, part.num_bytes)
                a, b, c = (column.tolist() for column in columns)
                self._planned.append((a, b, c))
        return sum(len(part[0]) for part in self._planned)

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join(WAIT_S)
        self._engine.close()
        self._pusher.close()


def check(pair: Pair, source: list[int], destination: list[int]) -> None:
    """Raises RuntimeError unless exactly these pages arrive as they are."""
    want = pair.digests()
    for here, there in zip(source, destination, strict=True):
        want[there] = page_digest(pair.pool, here)
    pair.push(source, destination)
    if pair.digests() != want:
        raise RuntimeError("the gate failed: what arrived is not what was sent")


def clocked(
    send: Callable[[list[int], list[int]], None], source: list[int], destination: list[int]
) -> tuple[float, float]:
    """Seconds on the clock and of this process's CPUs."""
    cpu, clock = time.process_time(), time.perf_counter()
    send(source, destination)
    return time.perf_counter() - clock, time.process_time() - cpu


def measure(setting: Setting, rounds: int) -> list[Row]:
    pair = Pair(setting)
    model, num_pages = setting.model, setting.num_pages
    rows = []
    shuffled = random.Random(0).sample(range(1, num_pages + 1), num_pages)
    in_order = list(range(1, num_pages + 1))
    half = num_pages // 2
    check(pair, shuffled[:half], shuffled[half : 2 * half])
    cases = {"contiguous": (in_order, in_order), "scattered": (in_order, shuffled)}
    for name, (source, destination) in cases.items():
        num_writes = pair.prepare_raw(source, destination)
        num_bytes = num_pages * pair.record.page_bytes
        raw, ours = [], []
        for number in track(range(rounds + 1), f"{model}, {name}", console=Console(stderr=True)):
            found = [
                clocked(pair.raw, source, destination),
                clocked(pair.push, source, destination),
            ]
            if number:  # the first round opens connections
                raw.append(found[0])
                ours.append(found[1])
        gb = num_bytes / 1e9
        rows.append(
            Row(
                model=model,
                device=setting.device,
                protocol=setting.protocol,
                pages=name,
                num_pages=num_pages,
                num_writes=num_writes,
                mib=num_bytes / 2**20,
                raw_gb_s=statistics.median(gb / seconds for seconds, _ in raw),
                pusher_gb_s=statistics.median(gb / seconds for seconds, _ in ours),
                ratio=statistics.median(a[0] / b[0] for a, b in zip(raw, ours, strict=True)),
                raw_cpu_s_per_gb=statistics.median(cpu / gb for _, cpu in raw),
                pusher_cpu_s_per_gb=statistics.median(cpu / gb for _, cpu in ours),
            )
        )
    pair.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=0.25, help="sent in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--protocol", default="tcp", choices=PROTOCOLS)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/transfer.json"))
    args = parser.parse_args()
    rows: list[Row] = []
    for model, geometry in GEOMETRIES.items():
        page_bytes = KVPool.page_bytes(geometry, PAGE, torch.bfloat16)
        num_pages = max(2, int(args.gib * 2**30 / page_bytes))
        rows += measure(Setting(model, num_pages, args.device, args.protocol), args.rounds)
    table = Table(*asdict(rows[0]), title="one sender, one receiver")
    for row in rows:
        table.add_row(
            *(f"{v:.2f}" if isinstance(v, float) else str(v) for v in asdict(row).values())
        )
    Console(width=150, highlight=False).print(table)
    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.ratio >= LEAST_RATIO for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
