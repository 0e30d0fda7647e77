"""How large a worker's KV pool is and how long a request may be, from options and free memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import WorkerConfig
from engine.model.base import Model
from kvcache.host_size import read_host_memory

_CPU_SHARE = 0.25  # of the memory that is available once the weights are loaded
_CUDA_SHARE = 0.85


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
    config: WorkerConfig, model: Model, device: torch.device, bytes_per_token: int
) -> Capacity:
    """Raises CapacityError naming the option, the value and what would be accepted."""
    page_size = 64 if config.page_size is None else config.page_size
    num_shards = config.cp_size if config.shards_kv else 1
    if config.max_total_tokens is not None:
        num_pages = config.max_total_tokens // page_size
    else:
        # The ranks of a CPU group share one machine's memory; each GPU has its own.
        num_sharing = config.cp_size if device.type == "cpu" else 1
        num_pages = _free_bytes(device) // (bytes_per_token * page_size * num_sharing)
        # More than every running request at full length can use is waste.
        most = -(-model.context_length // page_size) * config.max_running_requests
        num_pages = min(num_pages, -(-most // num_shards))
    if num_pages < 2:
        raise CapacityError(
            f"--max-total-tokens {config.max_total_tokens}: the KV pool would hold {num_pages} "
            f"pages of {page_size} tokens ({bytes_per_token} bytes a token); at least 2 are needed"
        )
    chunk = config.chunked_prefill_size
    return Capacity(
        page_size=page_size,
        num_pages=num_pages,
        num_shards=num_shards,
        context_length=min(model.context_length, num_pages * num_shards * page_size),
        chunk_size=chunk if chunk is not None else (8192 if device.type == "cuda" else 128),
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(read_host_memory().available * _CPU_SHARE)  # the machine's, or what a cgroup leaves
