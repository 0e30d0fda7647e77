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
    max_total_tokens: int | None = None  # tokens the KV pool holds; None: from free memory
    chunked_prefill_size: int | None = None  # prompt tokens a step computes; None: by device
    max_running_requests: int = 64
    context_length: int | None = None  # None: the model's
    log_level: str = "info"
    parent_pid: int | None = None  # the process whose end is the worker's; None: who started it
