"""From a WorkerConfig to an engine that is ready to step: weights, pool, ranks, scheduler."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from engine.attention.group import GroupAttention
from engine.attention.local import local_attention
from engine.attention.paged import PagedAttention
from engine.attention.tables import TableAttention
from engine.capacity import (
    Capacity,
    check_pool_fits,
    chunk_size_of,
    free_host_bytes,
    most_host_bytes,
    plan_capacity,
)
from engine.config import IndexCacheDtype, WorkerConfig
from engine.decode_graphs import DecodeGraphs, can_record
from engine.device_memory import check_weights_fit, fits, free_device_bytes
from engine.engine import Engine, Mailbox, Rank, destination_of
from engine.fleet_memory import check_fleet_fits
from engine.handoff.pusher import Pusher
from engine.handoff.room import RoomReport
from engine.host_side import HostSide
from engine.messages import HostReport, Setup
from engine.model.base import Model
from engine.model.config import load_config
from engine.model.fingerprint import fingerprint
from engine.model.registry import ARCHITECTURES, load_model, resolve_dtype
from engine.model.weights import has_block_fp8, weight_bytes
from engine.page_tables import PageTables
from engine.parallel.group import Group
from engine.parallel.mesh import Mesh
from engine.rules import check_rules
from engine.runner import Runner
from engine.scheduler.scheduler import Scheduler
from engine.staging import Staging
from engine.types import ModelId, Numbers
from kernels.cpu import threads
from kernels.dispatch import describe, keeps_block_fp8
from kernels.linear import warm_up
from kvcache import cgroup
from kvcache.allocator import CPSharedPagedAllocator
from kvcache.events import EventLog
from kvcache.host_size import plan_host_pages, read_host_memory
from kvcache.layout import KVGeometry
from kvcache.pool import KVPool
from kvcache.prefix_cache import PrefixCache
from kvcache.tiered_cache import TieredCache
from kvcache.transfer.base import TransferEngine
from kvcache.transfer.mooncake import MooncakeEngine
from kvcache.transfer.plan import register_pool
from kvcache.transfer.system import check_reaches_gpus

log = logging.getLogger("plait.loading")

# Context tokens gathered at a time; more would only grow the workspace, fewer cost a pass each.
_BLOCK_TOKENS = {"cpu": 8192, "cuda": 32768}


@dataclass(frozen=True, slots=True)
class Weights:
    model: Model
    device: torch.device
    numbers: Numbers

    @property
    def kv_dtype(self) -> torch.dtype:
        return resolve_dtype(self.numbers.kv, self.device)

    @property
    def geometry(self) -> KVGeometry:
        """Of the KV rows: the model's, its index keys stored as the options say."""
        fp8_index_keys = self.numbers.index_keys != self.numbers.kv
        return replace(self.model.geometry, fp8_index_keys=fp8_index_keys)

    @property
    def bytes_per_token(self) -> int:
        return self.geometry.bytes_per_token(self.kv_dtype.itemsize)


def load_engine(config: WorkerConfig) -> Engine:
    """Start the group and load the model. Raises RuleError, ConfigError, WeightError, CapacityError
    or ValueError, each naming what was wrong and what would be accepted; no rank is left behind."""
    model_config = load_config(config.model, ARCHITECTURES, config.context_length)
    check_rules(config, model_config, _resolve_device(config.device))
    mailbox = Mailbox()
    group = Group(config, mailbox.put)
    try:
        return build_engine(config, load_weights(config, 0), group, mailbox)
    except BaseException:
        group.kill()
        raise


def build_engine(config: WorkerConfig, weights: Weights, group: Group, mailbox: Mailbox) -> Engine:
    """Around a loaded model: sizes the KV pool, sets the other ranks up, makes the scheduler."""
    capacity = _plan_capacity(config, weights)
    setup = Setup(
        store_file=group.store_file,
        page_size=capacity.page_size,
        num_pages=capacity.num_pages,
        num_host_pages=_plan_host_pages(config, capacity, weights),
        context_length=capacity.context_length,
    )
    group.setup(setup)
    leader = build_rank(config, 0, weights, setup, mailbox.put)
    group.wait_ready()
    _log_capacity(config, weights, capacity, setup.num_host_pages)
    events = EventLog(config.hash_salt.encode())
    model_id = _identify(config, weights)
    return Engine(
        weights.model.vocab_size,
        weights.bytes_per_token,
        capacity,
        model_id,
        _build_scheduler(config, capacity, setup, weights.model, leader, model_id, events),
        leader,
        group,
        mailbox,
        events,
    )


def load_weights(config: WorkerConfig, rank: int) -> Weights:
    """This rank's copy of the model; on a GPU that one becomes this thread's. Raises CapacityError
    where it does not fit there."""
    device = _resolve_device(config.device, rank)
    dtype = resolve_dtype(config.dtype, device)
    keeps_fp8 = _keeps_fp8(config, device, dtype)
    numbers = numbers_of(dtype, device, keeps_fp8, config.index_cache_dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        needed = weight_bytes(config.model, dtype, keeps_fp8=keeps_fp8)
        check_weights_fit(config, device, numbers, needed)
    if device.type == "cpu":
        threads.configure(max(1, cgroup.available_cpus() // config.cp_size))
        with threads.one_compiler():
            warm_up((dtype,))
    with fits(config, device, "the weights"):
        model = load_model(config.model, device, dtype, config.context_length, keeps_fp8=keeps_fp8)
    return Weights(model, device, numbers)


def _keeps_fp8(config: WorkerConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Float32 asks for digits rather than for speed."""
    may = config.quantization == "auto" and dtype.itemsize == 2 and keeps_block_fp8(device)
    return may and has_block_fp8(config.model)


def numbers_of(
    dtype: torch.dtype,  # of the weights
    device: torch.device,
    keeps_fp8: bool = False,
    index_cache_dtype: IndexCacheDtype = "auto",
) -> Numbers:
    name = str(dtype).removeprefix("torch.")
    # Activations and KV rows are float32 on a CPU, whatever the weights are (docs/adr/0003).
    kv = "float32" if device.type == "cpu" else name
    index_keys = kv if index_cache_dtype == "auto" else index_cache_dtype
    return Numbers(weights=name, keeps_fp8=keeps_fp8, kv=kv, index_keys=index_keys)


def _identify(config: WorkerConfig, weights: Weights) -> ModelId:
    """Of the folder as it is: nobody replaces a model's files in the moments of a load."""
    return ModelId(
        fingerprint=fingerprint(Path(config.model)),
        numbers=weights.numbers,
        rope_context=weights.model.rope_context,
    )


def _plan_capacity(config: WorkerConfig, weights: Weights) -> Capacity:
    device, model = weights.device, weights.model
    chunk_size, bytes_per_token = chunk_size_of(config, device), weights.bytes_per_token
    weight_size, device_bytes = 0, None  # in the machine's memory, and not
    if device.type == "cpu":
        weight_size = model.num_bytes
        free_bytes, most_bytes = free_host_bytes(config, weight_size), most_host_bytes(config)
    else:
        free_bytes = most_bytes = device_bytes = free_device_bytes(
            config,
            model,
            weights.geometry,
            weights.kv_dtype,
            device,
            model.context_length,
            chunk_size,
        )
    capacity = plan_capacity(config, model, free_bytes, bytes_per_token, chunk_size)
    check_pool_fits(config, capacity, bytes_per_token, most_bytes)
    check_fleet_fits(config, model, bytes_per_token, weight_size, chunk_size, device_bytes)
    return capacity


def build_rank(
    config: WorkerConfig,
    rank: int,
    weights: Weights,
    setup: Setup,
    report: Callable[[RoomReport | HostReport], None],
) -> Rank:
    """Join the other ranks, who all call this at the same time, and lay out this rank's pool. Where
    the worker hands off or has a host tier, `report` is called from threads of those. Raises
    TransferError or TransferUnavailableError, too."""
    device, model = weights.device, weights.model
    store = FileStore(setup.store_file, config.cp_size) if config.cp_size > 1 else None
    mesh = Mesh(rank, config.cp_size, device, store)
    with fits(config, device, f"a KV pool of {setup.num_pages} pages of {setup.page_size} tokens"):
        pool = KVPool.create(
            weights.geometry,
            setup.page_size,
            setup.num_pages,
            weights.kv_dtype,
            device,
            cp_size=config.cp_size if config.shards_kv else 1,
            cp_rank=rank if config.shards_kv else 0,
        )
    attention: TableAttention | PagedAttention | GroupAttention
    if config.cp_size > 1:
        block_tokens = config.cp_stream_block_tokens or _BLOCK_TOKENS[device.type]
        attention = GroupAttention(pool, mesh, min(block_tokens, setup.context_length))
    else:
        attention = local_attention(pool)
    max_pages = -(-setup.context_length // setup.page_size)
    tables = PageTables(config.max_running_requests, max_pages, device)
    staging = Staging(device)
    # A prefill group computes no decodes.
    graphs = None
    runs_ahead = isinstance(attention, TableAttention) and config.role != "prefill"
    records = runs_ahead and _records(config, device) and can_record(model)
    if isinstance(attention, TableAttention) and records:
        graphs = DecodeGraphs(
            model, attention.begin, pool, tables, staging, config.max_running_requests
        )
        with fits(config, device, "recorded decode steps; --no-cuda-graphs records none"):
            graphs.capture()
    runner = Runner(
        model,
        attention.begin,
        mesh,
        config.cp_mode,
        tables=tables,
        staging=staging,
        page_size=setup.page_size,
        graphs=graphs,
        runs_ahead=runs_ahead,
    )
    transfer = _start_transfer(config, pool)
    pusher = None
    if transfer is not None and config.role == "prefill":
        pusher = Pusher(pool, transfer, rank, report)
    host = None
    if setup.num_host_pages:
        host = HostSide(pool, setup.num_host_pages, rank, report)
    return Rank(runner, mesh, attention.workspace_bytes, pool, pusher, transfer, host)


def _records(config: WorkerConfig, device: torch.device) -> bool:
    return config.cuda_graphs and device.type == "cuda"


def _plan_host_pages(config: WorkerConfig, capacity: Capacity, weights: Weights) -> int:
    """Of each rank; 0 without a host tier. The ranks of a group share one machine's memory."""
    if not config.hicache:
        return 0
    return plan_host_pages(
        device_pages=capacity.num_pages,
        page_bytes=weights.bytes_per_token * capacity.page_size,
        ratio=config.hicache_ratio,
        size_gb=config.hicache_size,
        memory=read_host_memory(),
        num_sharing=config.cp_size,
    )


def _start_transfer(config: WorkerConfig, pool: KVPool) -> TransferEngine | None:
    if not config.hands_off:
        return None
    if pool.device.type == "cuda":
        check_reaches_gpus()
    engine = MooncakeEngine(config.transfer_host, config.transfer_protocol)
    register_pool(engine, pool.record())
    return engine


def _build_cache(
    config: WorkerConfig, capacity: Capacity, num_host_pages: int, events: EventLog
) -> PrefixCache:
    page_size, num_shards = capacity.page_size, capacity.num_shards
    allocator = CPSharedPagedAllocator(capacity.num_pages, page_size, num_shards)
    if not num_host_pages:
        return PrefixCache(allocator, events)
    return TieredCache(
        allocator,
        CPSharedPagedAllocator(num_host_pages, page_size, num_shards),
        policy=config.hicache_write_policy,
        num_ranks=config.cp_size,
        events=events,
    )


def _build_scheduler(
    config: WorkerConfig,
    capacity: Capacity,
    setup: Setup,
    model: Model,
    leader: Rank,
    model_id: ModelId,
    events: EventLog,
) -> Scheduler:
    return Scheduler(
        _build_cache(config, capacity, setup.num_host_pages, events),
        chunk_size=capacity.chunk_size,
        max_running=config.max_running_requests,
        context_length=capacity.context_length,
        vocab_size=model.vocab_size,
        num_ranks=config.cp_size,
        destination=destination_of(leader, model_id),
        looks_ahead=leader.runner.runs_ahead,
    )


def _log_capacity(
    config: WorkerConfig, weights: Weights, capacity: Capacity, num_host_pages: int
) -> None:
    if config.shards_kv:
        log.info(
            "CP shared KV enabled. physical_tokens_per_rank=%d, logical_tokens=%d, cp_size=%d, "
            "shard_policy=page_interleaved",
            capacity.physical_tokens,
            capacity.logical_tokens,
            config.cp_size,
        )
    log.info(
        "%s on %s in %s: KV of %d tokens in %d pages of %d (%.2f GiB a rank), context %d",
        config.model,
        weights.device,
        weights.numbers,
        capacity.logical_tokens,
        capacity.logical_pages,
        capacity.page_size,
        capacity.physical_tokens * weights.bytes_per_token / 2**30,
        capacity.context_length,
    )
    log.info("kernels on %s: %s", weights.device, describe(weights.device))
    if num_host_pages:
        log.info(
            "host tier: %d tokens in %d pages (%.2f GiB a rank), %s",
            num_host_pages * capacity.num_shards * capacity.page_size,
            num_host_pages * capacity.num_shards,
            num_host_pages * capacity.page_size * weights.bytes_per_token / 2**30,
            config.hicache_write_policy,
        )


def _resolve_device(name: str, rank: int = 0) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise ValueError(f"--device {name}: accepted are auto, cpu, cuda and cuda:N")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch {torch.__version__} finds no CUDA device")
    return torch.device("cuda", (device.index or 0) + rank)
