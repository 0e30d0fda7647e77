"""How large a worker's KV pool is and how long a request may be, from options and free memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import WorkerConfig
from engine.model.base import Model
from kvcache.host_size import read_host_memory

_CPU_SHARE = 0.25  # of the memory that is available once the weights are loaded


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
    fitting = free_bytes // (bytes_per_token * page_size) - 1  # and the dummy page
    num_pages = min(fitting, -(-most // num_shards))
    if config.max_total_tokens is not None:
        num_pages = config.max_total_tokens // page_size
    if num_pages < 2:
        raise CapacityError(
            f"--max-total-tokens {config.max_total_tokens}: the KV pool would hold {num_pages} "
            f"pages of {page_size} tokens ({bytes_per_token} bytes a token); at least 2 are needed"
        )
    return Capacity(
        page_size=page_size,
        num_pages=num_pages,
        num_shards=num_shards,
        context_length=min(model.context_length, num_pages * num_shards * page_size),
        chunk_size=chunk_size,
    )


def free_host_bytes(config: WorkerConfig) -> int:
    """For one rank's KV pool in the machine's memory, or what a cgroup leaves of it, which the
    ranks of a group share."""
    return int(read_host_memory().available * _CPU_SHARE) // config.cp_size


def chunk_size_of(config: WorkerConfig, device: torch.device) -> int:
    """Prompt tokens that a step computes, at most."""
    if config.chunked_prefill_size is not None:
        return config.chunked_prefill_size
    return 8192 if device.type == "cuda" else 128
