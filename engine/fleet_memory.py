"""Whether the workers that one front end starts on its own machine fit its memory together. Each
looks at its own pools as well (engine/capacity.py, kvcache/host_size.py)."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.capacity import CapacityError, free_host_bytes, gib, plan_capacity
from engine.config import LocalWorker, WorkerConfig
from engine.model.base import Model


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of the machine's memory that each rank of a worker takes."""

    worker: LocalWorker
    weights: int
    pool: int
    host_pool: int
    tokens: int  # that the KV pool holds, wherever it lies

    @property
    def of_rank(self) -> int:
        return self.weights + self.pool + self.host_pool

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV pool": self.pool, "host pool": self.host_pool}
        told = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        return (
            f"{self.worker.title} {self.worker.cp_size} x {gib(self.of_rank)} ({told}; "
            f"{self.tokens} tokens)"
        )


def check_fleet_fits(
    config: WorkerConfig,
    model: Model,
    bytes_per_token: int,
    weight_bytes: int,  # of a rank, in the machine's memory
    chunk_size: int,
    device_bytes: int | None,  # for a KV pool on a GPU of the fleet's; None: it is a CPU's
) -> None:
    """Raises CapacityError that names every worker's share where they are more than there is."""
    fleet = config.local_fleet
    if fleet is None or config.title != fleet.workers[0].title:  # one says it for all
        return
    shares = []
    for worker in fleet.workers:
        told = msgspec.structs.replace(config, **msgspec.structs.asdict(worker))
        free = free_host_bytes(told, weight_bytes) if device_bytes is None else device_bytes
        capacity = plan_capacity(told, model, free, bytes_per_token, chunk_size)
        page_bytes = capacity.page_size * bytes_per_token
        shares.append(
            Share(
                worker,
                weights=weight_bytes,
                pool=(capacity.num_pages + 1) * page_bytes if device_bytes is None else 0,
                host_pool=_host_pool_bytes(told, capacity.num_pages * page_bytes),
                tokens=capacity.physical_tokens,
            )
        )
    needed = sum(share.worker.cp_size * share.of_rank for share in shares)
    if needed > fleet.available_bytes:
        flags = "--max-total-tokens, --prefill-max-total-tokens or --decode-max-total-tokens"
        if config.hicache:
            flags = f"--hicache-size, --hicache-ratio, {flags}"
        raise CapacityError(
            f"the workers of this machine would take {gib(needed)} of its memory, and "
            f"{gib(fleet.available_bytes)} are available: {', '.join(map(str, shares))}; a smaller "
            f"{flags} takes less"
        )


def _host_pool_bytes(config: WorkerConfig, pool_bytes: int) -> int:
    if not config.hicache:
        return 0
    if config.hicache_size is not None:
        return int(config.hicache_size * 10**9)
    return int(config.hicache_ratio * pool_bytes)
