"""The workers that are there: who said hello, how loaded each is, and who is refused. The one
source of load.

Owned by the event loop. Knows no request's content and no socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from engine.messages import Heartbeat, Hello
from engine.peers import MAX_SILENT_LOOKS
from engine.types import Load, MetricFamily, ModelId

# Why a worker is no longer there: the first two without fault. `replaced`: another process answers
# at its address, and it said no goodbye.
Loss = Literal["removed", "ended", "replaced", "disconnected", "silent"]


@dataclass(slots=True, eq=False)
class Worker:
    address: str  # of its control socket
    hello: Hello
    slot: int  # small and reused: the worker's name in metrics
    num_live: int = 0  # unfinished requests given to it
    live_tokens: int = 0  # of those without a first token: prompt tokens to compute, as estimated
    num_heard: int = 0  # messages that came from it: a sign of life
    num_silent_looks: int = 0
    is_retired: bool = False  # where it was found it is ready no more
    load: Load = field(default_factory=Load)
    families: list[MetricFamily] = field(default_factory=list)

    @property
    def takes_requests(self) -> bool:
        """It is neither about to end nor known to be."""
        return not (self.load.is_draining or self.is_retired)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What every request is checked against, how its pages are named, and what answers it."""

    vocab_size: int
    context_length: int  # prompt + output tokens, at most; never more than each pool holds
    page_size: int
    hash_salt: str
    model_id: ModelId


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker that said hello and is given nothing: another model's tokens would go on with the
    answers of the others."""

    hello: Hello
    reason: str


class Fleet:
    """`fingerprint`: of the front end's own model folder, which then says what workers must hold;
    empty where it has no weights: then the first of them does."""

    def __init__(self, fingerprint: str = "") -> None:
        self._fingerprint = fingerprint
        self._workers: dict[str, Worker] = {}  # by address
        self.refused: dict[str, Refused] = {}  # by address
        self.capabilities: Capabilities | None = (
            None  # None until it could serve for the first time
        )

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    @property
    def is_whole(self) -> bool:
        """There is a worker that does all, or one for each half."""
        return _is_whole({worker.hello.role for worker in self})

    @property
    def can_serve(self) -> bool:
        """The same of those that take requests."""
        return _is_whole({worker.hello.role for worker in self if worker.takes_requests})

    def at(self, address: str) -> Worker | None:
        return self._workers.get(address)

    def misfit(self, hello: Hello) -> str:
        """Why this worker cannot be one of the fleet; empty where it can."""
        theirs = hello.model_id
        if self._fingerprint and theirs.fingerprint != self._fingerprint:
            return (
                f"it holds the model {theirs.fingerprint} of {hello.model}, --model"
                f" of this front end is {self._fingerprint}; expected the same files for both, or a"
                " restart of whichever has older ones"
            )
        first = next(iter(self), None)
        if first is None or first.hello.model_id == theirs:
            return ""
        return (
            f"it holds the model {theirs} of {hello.model}, the {first.hello.role} worker at"
            f" {first.address} {first.hello.model_id} of {first.hello.model}; expected the same"
            " --model files, --dtype, --quantization, --index-cache-dtype and --context-length on"
            " the same kind of --device for all workers"
        )

    def join(self, address: str, hello: Hello) -> Worker:
        used = {worker.slot for worker in self if worker.hello.role == hello.role}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        worker = self._workers[address] = Worker(address, hello, slot)
        if self.is_whole:
            self.capabilities = self._common()
        return worker

    def leave(self, address: str) -> Worker | None:
        worker = self._workers.pop(address, None)
        if self.is_whole:
            self.capabilities = self._common()
        return worker

    def with_instance(self, instance_id: str) -> Worker | None:
        return next((w for w in self if w.hello.instance_id == instance_id), None)

    def num_heard(self, pid: int) -> int | None:
        """How often that child of this process was heard since its hello; None where it has said
        none, or has left."""
        return next((worker.num_heard for worker in self if worker.hello.pid == pid), None)

    def heard(self, address: str) -> None:
        """A message of this worker came, of whatever kind."""
        worker = self._workers.get(address)
        if worker is not None:
            worker.num_heard += 1
            worker.num_silent_looks = 0

    def beat(self, address: str, heartbeat: Heartbeat) -> None:
        worker = self._workers.get(address)
        if worker is not None:
            worker.load = heartbeat.load
            worker.families = heartbeat.metrics

    def look(self) -> list[Worker]:
        """To be called every LOOK_S: the workers that have fallen silent."""
        silent = []
        for worker in self:
            worker.num_silent_looks += 1
            if worker.num_silent_looks > MAX_SILENT_LOOKS:
                silent.append(worker)
        return silent

    def _common(self) -> Capabilities:
        """What all workers can do: a request may be replayed on any of them."""
        hellos = [worker.hello for worker in self]
        return Capabilities(
            vocab_size=min(hello.vocab_size for hello in hellos),
            context_length=min(
                min(hello.context_length, hello.total_pages * hello.page_size) for hello in hellos
            ),
            page_size=hellos[0].page_size,
            hash_salt=hellos[0].hash_salt,
            model_id=hellos[0].model_id,
        )


def _is_whole(roles: set[str]) -> bool:
    return "colocated" in roles or {"prefill", "decode"} <= roles
