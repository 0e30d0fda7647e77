"""What one worker process is told at its start, resolved from the user's options."""

from __future__ import annotations

import msgspec


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Passed as one JSON argument to `python -m engine.worker`."""

    model: str  # a local folder: config.json, tokenizer, safetensors
    frontend_address: str  # ZeroMQ endpoint that the front end is bound to
    role: str = "colocated"
    index: int = 0  # of this worker among those of its role
    device: str = "auto"  # auto, cpu, cuda
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    page_size: int | None = None  # tokens; None: 64
    max_total_tokens: int | None = None  # a rank's KV pool, physical; None: from free memory
    chunked_prefill_size: int | None = None  # prompt tokens a step computes; None: by device
    max_running_requests: int = 64
    context_length: int | None = None  # None: the model's
    cp_size: int = 1  # ranks of the context-parallel group
    shared_kv: bool | None = None  # each rank holds a share of the KV; None: where cp_size > 1
    cp_mode: str = "in-seq-split"  # how tokens are dealt to the ranks
    cp_stream_block_tokens: int | None = None  # context tokens gathered at a time; None: by device
    hicache_storage_backend: str | None = None
    log_level: str = "info"
    parent_pid: int | None = None  # the process whose end is the worker's; None: who started it

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
