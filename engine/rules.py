"""Which options go together, checked before any weight is read. Each error names the flags, their
values and what would be accepted."""

from __future__ import annotations

from typing import Any

import torch

from engine.config import WorkerConfig
from engine.parallel.deal import DEAL_MODES

MAX_RANKS = 64


class RuleError(ValueError):
    """Options that cannot work together, or not with this model or machine."""


def check_rules(config: WorkerConfig, model_config: Any, device: torch.device) -> None:
    """`model_config`: the transformers config. Raises RuleError."""
    cp = f"--prefill-cp-size {config.cp_size}"
    if not 1 <= config.cp_size <= MAX_RANKS:
        raise RuleError(f"{cp}: a group has 1 to {MAX_RANKS} ranks")
    if config.role == "decode" and (config.cp_size > 1 or config.shared_kv):
        raise RuleError(
            f"{cp}, --enable-nsa-prefill-cp-shared-kv: decode workers hold the whole KV on one "
            "rank; give these flags to prefill groups only"
        )
    if config.shared_kv and config.cp_size == 1:
        raise RuleError(
            "--enable-nsa-prefill-cp-shared-kv needs a context-parallel group: give "
            f"--prefill-cp-size 2 or more (it is {config.cp_size})"
        )
    if config.cp_mode not in DEAL_MODES:
        raise RuleError(
            f"--nsa-prefill-cp-mode {config.cp_mode}: accepted are {', '.join(DEAL_MODES)}"
        )
    if config.cp_stream_block_tokens is not None and config.cp_stream_block_tokens < 1:
        raise RuleError(
            f"--cp-stream-block-tokens {config.cp_stream_block_tokens}: accepted is 1 or more"
        )
    page_size = config.tokens_per_page
    if getattr(model_config, "index_topk", None) and page_size != 64:
        raise RuleError(f"--page-size {page_size}: models with a lightning indexer need 64")
    _check_index_cache(config, model_config)
    first = device.index or 0
    if device.type == "cuda" and torch.cuda.device_count() < first + config.cp_size:
        raise RuleError(
            f"{cp}, --device {device}: a rank needs a GPU of its own, from number {first} on, and "
            f"this machine has {torch.cuda.device_count()}"
        )
    _check_storage(config)


def _check_index_cache(config: WorkerConfig, model_config: Any) -> None:
    if config.index_cache_dtype == "auto":
        return
    flag = f"--index-cache-dtype {config.index_cache_dtype}"
    if not getattr(model_config, "index_topk", None):
        raise RuleError(f"{flag}: this model has no lightning indexer; leave it out")
    if model_config.index_head_dim % 16:
        raise RuleError(
            f"{flag}: the model's index_head_dim is {model_config.index_head_dim}, and keys in fp8 "
            "need a multiple of 16; leave it out"
        )


def _check_storage(config: WorkerConfig) -> None:
    if config.hicache_storage_backend is None:
        return
    flag = f"--hicache-storage-backend {config.hicache_storage_backend}"
    if config.shards_kv:
        raise RuleError(
            f"{flag}: a storage backend does not work with KV shared by --prefill-cp-size "
            f"{config.cp_size} ranks yet; leave it out, or add "
            "--no-enable-nsa-prefill-cp-shared-kv"
        )
    raise RuleError(f"{flag}: there is no storage backend yet; leave it out")
