"""What one worker process is told at its start, resolved from the user's options."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.types import Role
from kvcache.host_plan import WritePolicy

Quantization: TypeAlias = Literal["auto", "none"]
IndexCacheDtype: TypeAlias = Literal["auto", "fp8_e4m3"]


class LocalWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker takes of a machine that it shares follows from these, which are as in its
    WorkerConfig; all else there is alike."""

    role: Role
    index: int
    cp_size: int
    shared_kv: bool | None
    max_total_tokens: int | None
    role_options: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.role} {self.index}"


class LocalFleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workers that one front end starts on its own machine."""

    workers: tuple[LocalWorker, ...]
    available_bytes: int  # of the machine's memory, before they were started


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Passed as one JSON argument to `python -m engine`."""

    model: str  # a local folder: config.json, tokenizer, safetensors
    listen_address: str  # ZeroMQ endpoint that the worker binds
    role: Role = "colocated"
    index: int = 0  # of this worker among those of its role
    device: str = "auto"  # auto, cpu, cuda
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    quantization: Quantization = "auto"  # of the weights; none: fp8 is dequantised on loading
    page_size: int | None = None  # tokens; None: 64
    index_cache_dtype: IndexCacheDtype = "auto"  # of the indexer's keys; auto: the KV pool's
    max_total_tokens: int | None = None  # a rank's KV pool, physical; None: from free memory
    chunked_prefill_size: int | None = None  # prompt tokens a step computes; None: by device
    max_running_requests: int = 64
    context_length: int | None = None  # None: the model's
    mem_fraction_static: float = 0.88  # of a GPU's memory: weights, KV pool and steps together
    cuda_graphs: bool = True  # decode steps are recorded and replayed, on a GPU
    cp_size: int = 1  # ranks of the context-parallel group
    shared_kv: bool | None = None  # each rank holds a share of the KV; None: where cp_size > 1
    cp_mode: str = "in-seq-split"  # how tokens are dealt to the ranks
    cp_stream_block_tokens: int | None = None  # context tokens gathered at a time; None: by device
    hicache: bool = False  # keep in host memory what leaves the device's prefix cache
    hicache_ratio: float = 2.0  # host pool, in device pools
    hicache_size: float | None = None  # GB (10**9 bytes) of each rank; None: by the ratio
    hicache_write_policy: WritePolicy = "write_through"
    hicache_storage_backend: str | None = None
    transfer_protocol: str = "tcp"  # of the hand-off: tcp, rdma, nvlink
    transfer_host: str = "127.0.0.1"  # by which decode workers are reached for it
    cluster_key_file: str | None = None  # encrypt and authenticate control connections
    hash_salt: str = ""  # of the prefix hashes; equal on all workers of a cluster
    drain_timeout_s: float = 30.0
    health_address: str | None = None  # HOST:PORT of its probes and metrics; None: nowhere
    log_level: str = "info"
    traces_url: str | None = None  # where spans go; None: nothing is traced
    parent_pid: int | None = None  # the process whose end is the worker's; None: nobody's
    local_fleet: LocalFleet | None = None  # that it is one of; None: it has its machine for itself
    role_options: tuple[str, ...] = ()  # of the above, those given for workers of its role alone

    @property
    def tokens_per_page(self) -> int:
        return 64 if self.page_size is None else self.page_size

    @property
    def title(self) -> str:
        return f"{self.role} {self.index}"

    def option(self, name: str) -> str:
        """One of the above as the operator gave it: the flag and the value."""
        role = f"{self.role}-" if name in self.role_options else ""
        return f"--{role}{name.replace('_', '-')} {getattr(self, name)}"

    @property
    def hands_off(self) -> bool:
        """It takes part in hand-offs, hence in transfers."""
        return self.role != "colocated"

    @property
    def shards_kv(self) -> bool:
        return self.cp_size > 1 and self.shared_kv is not False


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Passed as one JSON argument to `python -m engine.parallel.rank`."""

    worker: WorkerConfig
    rank: int  # 1 .. cp_size - 1; rank 0 is the leader
    plans_address: str  # ZeroMQ: where this rank's plans come from
    reports_address: str  # ZeroMQ: where its reports go
    leader_pid: int
