"""The transfer port: memory registered on one side, bytes written into it by another.

Knows addresses and lengths only; what lies there, pages or not, is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

# After a write has failed, bytes of it may reach a running peer for this long (Mooncake drops a
# connection without progress after half of it): its destination stays fenced meanwhile.
LATE_BYTES_S = 30.0

Addresses = npt.NDArray[np.int64]


class TransferError(Exception):
    """Bytes did not arrive, or not all of them, or not yet: see LATE_BYTES_S."""


class TransferUnavailableError(Exception):
    """This machine cannot run the engine or the protocol that was asked for."""


class Write(NamedTuple):
    """num_bytes bytes from our memory into the peer's."""

    source: int
    destination: int
    num_bytes: int


class Writes(Sequence[Write]):
    """Many writes by column: three int64 arrays of one length. A slice is a view."""

    __slots__ = ("destinations", "num_bytes", "sources")

    def __init__(self, sources: Addresses, destinations: Addresses, num_bytes: Addresses) -> None:
        self.sources = sources
        self.destinations = destinations
        self.num_bytes = num_bytes

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[Write]:
        columns = (self.sources.tolist(), self.destinations.tolist(), self.num_bytes.tolist())
        return map(Write._make, zip(*columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> Write: ...
    @overload
    def __getitem__(self, index: slice) -> Writes: ...
    def __getitem__(self, index: int | slice) -> Write | Writes:
        source, destination, size = (
            column[index] for column in (self.sources, self.destinations, self.num_bytes)
        )
        if isinstance(index, slice):
            return Writes(source, destination, size)
        return Write(int(source), int(destination), int(size))

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())


class TransferEngine(Protocol):
    """One process's end. In the order of use: register, tell peers `session`, write, forget, close.

    Thread-safe. Writes to one session run in the order given; sessions never wait for each other.
    """

    @property
    def session(self) -> str:
        """What peers name this engine by: "host:port"."""
        ...

    @property
    def protocol(self) -> str:
        """What the engine really runs over, as it says itself."""
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Let peers write into [address, address + num_bytes), and writes read from it.

        The memory must outlive the engine. Raises TransferError where it is refused.
        """
        ...

    def write(self, session: str, writes: Sequence[Write]) -> Future[None]:
        """Copy into the peer's registered memory; returns at once.

        The future resolves when all bytes are in the peer's memory, and raises TransferError
        otherwise. cancel() keeps a write that has not begun from beginning.
        """
        ...

    def forget(self, session: str) -> None:
        """The peer is gone: its waiting and running writes fail now. Unknown sessions: nothing."""
        ...

    def close(self) -> None:
        """Fail what waits or runs, join all threads and let nobody write here any more. A second
        call does nothing."""
        ...
