"""From a WorkerConfig to an engine that is ready to step: model, pool, scheduler, runner."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from engine.attention.paged import PagedAttention
from engine.capacity import Capacity, plan_capacity
from engine.config import WorkerConfig
from engine.model.base import Model
from engine.model.registry import load_model, resolve_dtype
from engine.parallel.mesh import Mesh
from engine.runner import Runner
from engine.scheduler.scheduler import Scheduler
from kernels.cpu import threads
from kernels.linear import warm_up
from kvcache.allocator import CPSharedPagedAllocator
from kvcache.pool import KVPool
from kvcache.prefix_cache import PrefixCache

log = logging.getLogger("plait.loading")


@dataclass(frozen=True, slots=True)
class Engine:
    model: Model
    capacity: Capacity
    scheduler: Scheduler
    runner: Runner


def load_engine(config: WorkerConfig) -> Engine:
    """Load the model and lay out its pool. Raises ConfigError, WeightError, CapacityError or
    ValueError, each naming what was wrong and what would be accepted."""
    device = _resolve_device(config.device)
    if device.type == "cpu":
        threads.configure(len(os.sched_getaffinity(0)))
    dtype = resolve_dtype(config.dtype, device)
    if device.type == "cpu":
        warm_up((dtype,))
    model = load_model(config.model, device, dtype, config.context_length)
    # Activations and KV rows are float32 on a CPU, whatever the weights are (docs/adr/0003).
    kv_dtype = torch.float32 if device.type == "cpu" else dtype
    bytes_per_token = model.geometry.elements_per_token * kv_dtype.itemsize
    capacity = plan_capacity(config, model, device, bytes_per_token)
    pool = KVPool.create(model.geometry, capacity.page_size, capacity.num_pages, kv_dtype, device)
    log.info(
        "%s on %s: weights %s, KV %s, %d tokens in %d pages of %d (%.2f GiB), context %d",
        config.model,
        device,
        dtype,
        kv_dtype,
        pool.logical_tokens,
        pool.logical_pages,
        capacity.page_size,
        pool.num_bytes / 2**30,
        capacity.context_length,
    )
    attention = PagedAttention(pool)
    runner = Runner(
        model,
        lambda batch, share: attention.begin(batch),
        Mesh(0, 1, device),
        "in-seq-split",
        page_size=capacity.page_size,
        max_running=config.max_running_requests,
        max_pages=-(-capacity.context_length // capacity.page_size),
    )
    return Engine(model, capacity, _scheduler(config, capacity, model), runner)


def _scheduler(config: WorkerConfig, capacity: Capacity, model: Model) -> Scheduler:
    allocator = CPSharedPagedAllocator(capacity.num_pages, capacity.page_size)
    return Scheduler(
        PrefixCache(allocator),
        page_size=capacity.page_size,
        chunk_size=capacity.chunk_size,
        max_running=config.max_running_requests,
        context_length=capacity.context_length,
        vocab_size=model.vocab_size,
    )


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch {torch.__version__} finds no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: accepted are auto, cpu, cuda and cuda:N")
    return device
