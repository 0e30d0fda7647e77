"""The ranks of one group and their collectives. Owns the process groups; knows no tokens.

Every collective is entered by all ranks with equal shapes, which follow from the plan: a rank's own
data never decides whether or how one is entered.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_TIMEOUT = timedelta(minutes=10)  # a rank that died is noticed by the leader long before


class Gathered(Protocol):
    """A gather under way."""

    def wait(self) -> None:
        """Until the ranks' parts are there (for the current stream, on a GPU)."""
        ...


class Mesh:
    """This process among the `size` ranks of its group. One rank communicates with nobody."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store | None = None):
        """`store` is the group's rendezvous; not needed for one rank. Raises ValueError where rank
        and size do not fit, and what torch.distributed raises where the others do not come."""
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), got {rank}")
        self.rank = rank
        self.size = size
        self.device = device
        self.gathered_bytes = 0  # received from other ranks since the start
        self.wait_s = 0.0  # spent waiting for gathers
        self._side: dist.ProcessGroup | None = None
        if size > 1:
            if store is None:
                raise ValueError(f"{size} ranks need a rendezvous store")
            backend = "nccl" if device.type == "cuda" else "gloo"
            if sys.platform == "linux":
                # Else gloo listens at the address of the host's name. A group is of one machine.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT
            )
            # Blocks are gathered on a communicator of their own, ahead of the layer's gathers.
            self._side = dist.new_group(backend=backend, timeout=_TIMEOUT)
        on_gpu = device.type == "cuda" and size > 1
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each rank -> [size, n, ...], in rank order."""
        if self.size == 1:
            return own.unsqueeze(0)
        own = own.contiguous()
        parts = own.new_empty((self.size, *own.shape))
        started = time.perf_counter()
        _all_gather(parts.flatten(0, 1), own)
        self.wait_s += time.perf_counter() - started
        self._count(own)
        return parts

    def start_gather(self, own: torch.Tensor, parts: torch.Tensor) -> Gathered:
        """The same into `parts`, beside what the current stream computes. `own` and `parts` must
        stay as they are until the wait is over."""
        self._count(own)
        if self._stream is None:
            work = _all_gather(parts.flatten(0, 1), own, group=self._side, async_op=True)
            return _HostGather(self, work)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            _all_gather(parts.flatten(0, 1), own, group=self._side)
            event = self._stream.record_event()
        return _StreamGather(event)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _count(self, own: torch.Tensor) -> None:
        self.gathered_bytes += own.nbytes * (self.size - 1)


class _HostGather:
    def __init__(self, mesh: Mesh, work: dist.Work) -> None:
        self._mesh = mesh
        self._work = work

    def wait(self) -> None:
        started = time.perf_counter()
        self._work.wait()
        self._mesh.wait_s += time.perf_counter() - started


class _StreamGather:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.wait()
