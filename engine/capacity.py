"""How large a worker's KV pool is and how long a request may be, from options and free memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import WorkerConfig
from engine.model.base import Model
from kvcache.host_size import read_host_memory

# Of the memory that weights leave, where nobody says how large pools are: what one worker's KV pool
# takes at most, and those of all workers together with the host pools that go by them.
_CPU_SHARE = 0.25
_CPU_SHARE_OF_ALL = 0.75
_FEWEST_PAGES = 2


@dataclass(frozen=True, slots=True)
class Capacity:
    page_size: int
    num_pages: int  # physical, of one rank
    num_shards: int  # ranks that hold a share of the KV each; 1: every rank holds the whole
    context_length: int  # prompt and output tokens of one request
    chunk_size: int

    @property
    def logical_pages(self) -> int:
        return self.num_pages * self.num_shards

    @property
    def logical_tokens(self) -> int:
        return self.logical_pages * self.page_size

    @property
    def physical_tokens(self) -> int:
        """Of one rank."""
        return self.num_pages * self.page_size


class CapacityError(ValueError):
    """The options and this machine's memory do not fit together."""


def plan_capacity(
    config: WorkerConfig,
    model: Model,
    free_bytes: int,  # that one rank's KV pool may take
    bytes_per_token: int,
    chunk_size: int,
) -> Capacity:
    """Raises CapacityError naming the option, the value and what would be accepted."""
    page_size = config.tokens_per_page
    num_shards = config.cp_size if config.shards_kv else 1
    # More than every running request at full length can use is waste.
    most = -(-model.context_length // page_size) * config.max_running_requests
    fitting = _pages_that_fit(free_bytes, bytes_per_token, page_size)
    num_pages = max(_FEWEST_PAGES, min(fitting, -(-most // num_shards)))
    if config.max_total_tokens is not None:
        num_pages = config.max_total_tokens // page_size
        if num_pages < _FEWEST_PAGES:
            raise CapacityError(
                f"{config.option('max_total_tokens')}: the KV pool would hold {num_pages} "
                f"pages of {page_size} tokens; accepted are {_FEWEST_PAGES * page_size} or more"
            )
    elif fitting < _FEWEST_PAGES:
        raise CapacityError(
            f"--model {config.model}: {gib(free_bytes)} are left for the KV pool, which needs "
            f"{gib((_FEWEST_PAGES + 1) * page_size * bytes_per_token)} at least: "
            f"{_FEWEST_PAGES + 1} pages of {page_size} tokens, {bytes_per_token} bytes each; free "
            "some memory for it"
        )
    return Capacity(
        page_size=page_size,
        num_pages=num_pages,
        num_shards=num_shards,
        context_length=min(model.context_length, num_pages * num_shards * page_size),
        chunk_size=chunk_size,
    )


def check_pool_fits(
    config: WorkerConfig, capacity: Capacity, bytes_per_token: int, free_bytes: int
) -> None:
    """Raises CapacityError where the KV pool that was asked for exceeds what is left for it."""
    page_size = capacity.page_size
    needed = (capacity.num_pages + 1) * page_size * bytes_per_token
    if needed > free_bytes:
        most = _pages_that_fit(free_bytes, bytes_per_token, page_size)
        accepted = f"accepted are up to {most * page_size}" if most > 1 else "nothing would fit"
        raise CapacityError(
            f"{config.option('max_total_tokens')}: a KV pool of that size takes "
            f"{gib(needed)}, and {gib(free_bytes)} are left for it; {accepted}"
        )


def _pages_that_fit(free_bytes: int, bytes_per_token: int, page_size: int) -> int:
    """Beside the dummy page."""
    return max(0, free_bytes // (bytes_per_token * page_size) - 1)


def free_host_bytes(config: WorkerConfig, weight_bytes: int) -> int:
    """For one rank's KV pool in the machine's memory, or what a cgroup leaves of it, where nobody
    asked for a size. Ranks share it, and so do workers that were started together, each rank of
    which has weights of its own."""
    available, num_workers = read_host_memory().available, 1
    if (fleet := config.local_fleet) is not None:
        num_workers = len(fleet.workers)
        num_ranks = sum(worker.cp_size for worker in fleet.workers)
        available = min(available, fleet.available_bytes - num_ranks * weight_bytes)
    host_pools = config.hicache_ratio if config.hicache and config.hicache_size is None else 0.0
    share = min(_CPU_SHARE, _CPU_SHARE_OF_ALL / (num_workers * (1 + host_pools)))
    return int(max(0, available) * share) // config.cp_size


def most_host_bytes(config: WorkerConfig) -> int:
    """For a KV pool that was asked for: all that this machine has available for each rank."""
    return read_host_memory().available // config.cp_size


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def chunk_size_of(config: WorkerConfig, device: torch.device) -> int:
    """Prompt tokens that a step computes, at most."""
    if config.chunked_prefill_size is not None:
        return config.chunked_prefill_size
    return 8192 if device.type == "cuda" else 128
