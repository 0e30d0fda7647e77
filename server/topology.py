"""Which workers a local fleet has, from options and GPUs, and what any worker is told.

Pure, but for counting GPUs. Knows no process.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.config import LocalFleet, LocalWorker, WorkerConfig
from engine.types import Role
from server.options.config import ConfigError, ServeConfig

_CPU_CP_SIZE = 2
# Options of WorkerConfig that --prefill-… and --decode-… flags give for workers of one role.
_BY_ROLE = ("max_total_tokens",)


@dataclass(frozen=True, slots=True)
class Topology:
    """`devices` are how many GPUs are used, 0 on a CPU."""

    num_groups: int  # prefill groups; 0: colocated
    cp_size: int  # ranks of a group, or of the colocated worker
    num_decode: int
    num_devices: int

    def __str__(self) -> str:
        where = f" on {self.num_devices} GPUs" if self.num_devices else " on the CPU"
        if not self.num_groups:
            return f"one colocated worker of {_ranks(self.cp_size)}{where}"
        groups = "group" if self.num_groups == 1 else "groups"
        workers = "worker" if self.num_decode == 1 else "workers"
        return (
            f"{self.num_groups} prefill {groups} of {_ranks(self.cp_size)}, {self.num_decode} "
            f"decode {workers}{where}"
        )


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def plan_topology(config: ServeConfig, num_gpus: int) -> Topology:
    """What the options ask for; what they leave open goes by the machine. On a CPU: a prefill group
    of two ranks and a decode worker. On one GPU: colocated, since every rank needs one of its own.
    On more: half of them prefill as one group, the others decode. Raises ConfigError."""
    num_gpus = max(0, num_gpus - _first_gpu(config))
    on_gpu = num_gpus > 0 and config.device != "cpu"
    asked = ["prefill_groups", "decode_workers"]
    asked += [f"{role}_{name}" for role in ("prefill", "decode") for name in _BY_ROLE]
    given = [name for name in asked if getattr(config, name) is not None]
    if config.colocated and given:
        flag = "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"{flag} {getattr(config, given[0])}: a colocated worker has no such part; leave it "
            "out, or leave out --colocated"
        )
    if config.colocated or (on_gpu and num_gpus == 1 and not given):
        cp_size = config.prefill_cp_size or 1
        if on_gpu and cp_size > num_gpus:
            raise ConfigError(
                f"--prefill-cp-size {cp_size}: needs {cp_size} GPUs, one for each rank; this "
                f"machine has {num_gpus}"
            )
        return Topology(0, cp_size, 0, cp_size if on_gpu else 0)
    num_groups = config.prefill_groups or 1
    num_decode = config.decode_workers or 1
    if not on_gpu:
        return Topology(num_groups, config.prefill_cp_size or _CPU_CP_SIZE, num_decode, 0)
    if config.decode_workers is None:
        cp_size = config.prefill_cp_size or max(1, num_gpus // 2 // num_groups)
        num_decode = max(1, num_gpus - num_groups * cp_size)
    cp_size = config.prefill_cp_size or max(1, (num_gpus - num_decode) // num_groups)
    needed = num_groups * cp_size + num_decode
    if needed > num_gpus:
        raise ConfigError(
            f"--prefill-groups {num_groups}, --prefill-cp-size {cp_size}, --decode-workers "
            f"{num_decode}: need {needed} GPUs, one for each rank; this machine has {num_gpus}"
        )
    return Topology(num_groups, cp_size, num_decode, needed)


def worker_configs(
    config: ServeConfig, topology: Topology, model_path: Path, folder: Path, available_bytes: int
) -> list[WorkerConfig]:
    """One for each worker; their control sockets lie in `folder`, and they share the machine's
    `available_bytes` of memory."""
    salt = hash_salt(config)
    device = _first_gpu(config)

    def make(role: Role, index: int, cp_size: int) -> WorkerConfig:
        nonlocal device
        where = f"cuda:{device}" if topology.num_devices else None
        device += cp_size
        return worker_config(
            config,
            role,
            index,
            model_path=model_path,
            listen_address=f"ipc://{folder}/{role}-{index}",
            cp_size=cp_size,
            salt=salt,
            device=where,
            parent_pid=os.getpid(),
        )

    if not topology.num_groups:
        told = [make("colocated", 0, topology.cp_size)]
    else:
        told = [make("prefill", i, topology.cp_size) for i in range(topology.num_groups)]
        told += [make("decode", i, 1) for i in range(topology.num_decode)]
    local = [msgspec.convert(worker, LocalWorker, from_attributes=True) for worker in told]
    fleet = LocalFleet(tuple(local), available_bytes)
    return [msgspec.structs.replace(worker, local_fleet=fleet) for worker in told]


def worker_config(
    config: ServeConfig,
    role: Role,
    index: int,
    *,
    model_path: Path,
    listen_address: str,
    cp_size: int,
    salt: str = "",
    device: str | None = None,
    parent_pid: int | None = None,
) -> WorkerConfig:
    """What one worker is told; `model_path` is the local folder that --model resolved to,
    `parent_pid` the process whose end is the worker's."""
    of_role = _given_for(role, config)
    is_group = role != "decode"
    return WorkerConfig(
        model=str(model_path),
        listen_address=listen_address,
        role=role,
        index=index,
        device=config.device if device is None else device,
        dtype=config.dtype,
        quantization=config.quantization,
        page_size=config.page_size,
        index_cache_dtype=config.index_cache_dtype,
        max_total_tokens=of_role.get("max_total_tokens", config.max_total_tokens),
        chunked_prefill_size=config.chunked_prefill_size,
        max_running_requests=config.max_running_requests,
        mem_fraction_static=config.mem_fraction_static,
        cuda_graphs=config.cuda_graphs,
        context_length=config.context_length,
        cp_size=cp_size,
        shared_kv=config.enable_nsa_prefill_cp_shared_kv if is_group else None,
        cp_mode=config.nsa_prefill_cp_mode,
        cp_stream_block_tokens=config.cp_stream_block_tokens if is_group else None,
        hicache=config.enable_hierarchical_cache,
        hicache_ratio=config.hicache_ratio,
        hicache_size=config.hicache_size,
        hicache_write_policy=config.hicache_write_policy,
        hicache_storage_backend=config.hicache_storage_backend,
        transfer_protocol=config.transfer_protocol,
        transfer_host=config.transfer_host,
        # Absolute: a worker runs in another folder.
        cluster_key_file=str(config.cluster_key_file.expanduser().absolute())
        if config.cluster_key_file
        else None,
        hash_salt=salt,
        drain_timeout_s=config.drain_timeout_s,
        # Workers that a front end starts would all ask for the same port.
        health_address=config.health_address if parent_pid is None else None,
        log_level=config.log_level,
        traces_url=config.traces_url,
        parent_pid=parent_pid,
        role_options=tuple(of_role),
    )


def _given_for(role: Role, config: ServeConfig) -> dict[str, Any]:
    """What was given for workers of the role alone, by the option's name without it."""
    given = {name: getattr(config, f"{role}_{name}", None) for name in _BY_ROLE}
    return {name: value for name, value in given.items() if value is not None}


def _first_gpu(config: ServeConfig) -> int:
    """The number of the first GPU to use: N of --device cuda:N."""
    kind, _, number = config.device.partition(":")
    return int(number) if kind == "cuda" and number else 0


def hash_salt(config: ServeConfig) -> str:
    """Of the names that pages go by: equal on all workers that share a cluster key, else new with
    each process. Workers whose salts differ are served all the same, but only those with the salt
    of the first are found by prefix."""
    if config.cluster_key_file is not None:
        try:
            secret = config.cluster_key_file.expanduser().read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--cluster-key-file {config.cluster_key_file}: {error}") from error
        return hashlib.sha256(b"plait prefix hashes" + secret).hexdigest()
    return secrets.token_hex(16)


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use, without loading a CUDA library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
