"""The options as flags: which of them each verb takes, and how --help shows them.

Knows no option's meaning, and of environment and file only that they are read as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from server.options.config import OPTIONS, ServeConfig
from server.options.loading import load
from server.options.option import ENV_PREFIX, Option

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


def options_of(verb: str) -> list[Option]:
    """Those that mean something to the verb, in the product's order."""
    groups, left_out = GROUPS[verb], NOT_FOR[verb]
    return [o for o in OPTIONS.values() if o.group in groups and o.name not in left_out]


def add_arguments(parser: argparse.ArgumentParser, verb: str = "serve") -> None:
    """One flag for each option of the verb, in the options' groups, and --config."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"YAML file of options, keys named as the flags (also {ENV_PREFIX}CONFIG)",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options_of(verb):
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        kwargs: dict[str, Any] = {
            "dest": option.name,
            "default": argparse.SUPPRESS,
            "help": option.help,
        }
        if option.kind is bool:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs["metavar"] = option.metavar
            if option.is_list:
                kwargs["action"] = "append"
        groups[option.group].add_argument(option.flag, **kwargs)


def parse(argv: Sequence[str]) -> ServeConfig:
    """The options of a bare command line, as `plait serve` reads them; for tests and tools."""
    parser = argparse.ArgumentParser(prog="plait serve", allow_abbrev=False)
    add_arguments(parser)
    flags = vars(parser.parse_args(argv))
    return load(flags, flags.pop("config", None))
