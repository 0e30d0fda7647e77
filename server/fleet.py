"""The workers that are there: who said hello, how loaded each is. The one source of load.

Owned by the event loop. Knows no request's content and no socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.messages import Heartbeat, Hello
from engine.types import Load, MetricFamily


@dataclass(slots=True)
class Worker:
    hello: Hello
    slot: int  # small and reused: the worker's name in metrics
    num_live: int = 0  # unfinished requests given to it
    num_heard: int = 0  # messages that came from it: a sign of life
    load: Load = field(default_factory=Load)
    families: list[MetricFamily] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What every request is checked against."""

    vocab_size: int
    context_length: int  # prompt + output tokens, at most; never more than the pool holds


class Fleet:
    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self.capabilities: Capabilities | None = None  # None until the first hello

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, instance_id: str) -> Worker | None:
        return self._workers.get(instance_id)

    def join(self, hello: Hello) -> None:
        used = {worker.slot for worker in self if worker.hello.role == hello.role}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        self._workers[hello.instance_id] = Worker(hello, slot)
        self.capabilities = self._common()

    def leave(self, instance_id: str) -> Worker | None:
        worker = self._workers.pop(instance_id, None)
        if self._workers:
            self.capabilities = self._common()
        return worker

    def instance_of(self, pid: int) -> str | None:
        return next((w.hello.instance_id for w in self if w.hello.pid == pid), None)

    def heard(self, instance_id: str) -> None:
        """A message of this worker came, of whatever kind."""
        worker = self._workers.get(instance_id)
        if worker is not None:
            worker.num_heard += 1

    def beat(self, instance_id: str, heartbeat: Heartbeat) -> None:
        worker = self._workers.get(instance_id)
        if worker is not None:
            worker.load = heartbeat.load
            worker.families = heartbeat.metrics

    def choose(self) -> Worker | None:
        """The least loaded worker. Requests given to it count at once, heartbeats lag."""
        return min(
            self._workers.values(),
            key=lambda worker: (worker.num_live, worker.load.waiting_tokens, worker.slot),
            default=None,
        )

    def _common(self) -> Capabilities:
        """What all workers can do: a request may be replayed on any of them."""
        hellos = [worker.hello for worker in self]
        return Capabilities(
            vocab_size=min(hello.vocab_size for hello in hellos),
            context_length=min(
                min(hello.context_length, hello.total_pages * hello.page_size) for hello in hellos
            ),
        )
