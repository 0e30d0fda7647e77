"""A decode worker's memory in a process of its own: a pool of each geometry, open to writes.

    python -m tests.kvcache.transfer.peer NUM_PAGES

Says its session and its pools' records on stdout, then answers each line of stdin, the name of a
geometry, with the digests of its row pages, until stdin ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType

import msgspec

from kvcache.transfer.record import PoolRecord


class Peer:
    """That process, as its starter sees it."""

    def __init__(self, num_pages: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvcache.transfer.peer", str(num_pages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def wait_ready(self) -> Peer:
        said = json.loads(self._answer())
        self.session: str = said["session"]
        self.records = msgspec.convert(said["records"], dict[str, PoolRecord])
        return self

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def digests(self, geometry: str) -> list[str]:
        """By row page."""
        assert self._process.stdin is not None
        print(geometry, file=self._process.stdin, flush=True)
        found: list[str] = json.loads(self._answer())
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    from kvcache.transfer.digest import page_digest
    from kvcache.transfer.mooncake import MooncakeEngine
    from kvcache.transfer.plan import register_pool
    from tests.kvcache.transfer.pools import GEOMETRIES, random_pool

    num_pages = int(sys.argv[1])
    pools = {name: random_pool(geometry, num_pages, 99) for name, geometry in GEOMETRIES.items()}
    records = {name: pool.record() for name, pool in pools.items()}
    engine = MooncakeEngine()
    for record in records.values():
        register_pool(engine, record)
    print(msgspec.json.encode({"session": engine.session, "records": records}).decode(), flush=True)
    for line in sys.stdin:
        pool = pools[line.strip()]
        print(json.dumps([page_digest(pool, i) for i in range(num_pages + 1)]), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
