"""The options of plait as values.schema.json has them: `python -m helm.schema` writes them anew.

Owns which options a chart's user may set; what the chart sets itself is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from server.options.arguments import options_of
from server.options.config import OPTIONS
from server.options.option import Option

SCHEMA = Path(__file__).parent / "values.schema.json"
ROLES = ("frontend", "prefill", "decode")
# What templates give as flags, what only a fleet of one machine has, and a tier that none has yet.
OF_THE_CHART = frozenset(
    {
        "api_key",
        "api_key_file",
        "cluster_key_file",
        "colocated",
        "decode_max_total_tokens",
        "decode_workers",
        "device",
        "drain_delay_s",
        "drain_timeout_s",
        "health_address",
        "hicache_storage_backend",
        "host",
        "kubernetes_api",
        "kubernetes_credentials",
        "listen",
        "model",
        "port",
        "prefill_cp_size",
        "prefill_groups",
        "prefill_max_total_tokens",
        "served_model_name",
        "transfer_host",
        "transfer_protocol",
        "workers",
    }
)


def option_names(role: str) -> list[str]:
    """The options of a role that are a user's to set, in the product's order."""
    return [option.name for option in options_of(role) if option.name not in OF_THE_CHART]


def schema_of(names: Iterable[str]) -> dict[str, Any]:
    """A JSON schema of an object with these options."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _property(OPTIONS[name]) for name in names},
    }


def definitions() -> dict[str, Any]:
    """Those that all roles have, and those of each."""
    of_role = {role: option_names(role) for role in ROLES}
    shared = [name for name in of_role["frontend"] if all(name in n for n in of_role.values())]
    return {
        "options": schema_of(shared),
        **{f"{role}Options": schema_of(names) for role, names in of_role.items()},
    }


def _property(option: Option) -> dict[str, Any]:
    described = {"description": option.field.description or ""}
    if option.choices:
        return {"enum": list(option.choices), **described}
    if option.is_list:
        return {"type": "array", "items": {"type": "string", "pattern": "^[^,]+$"}, **described}
    names = {bool: "boolean", int: "integer", float: "number"}
    found: dict[str, Any] = {"type": names.get(option.kind, "string")}
    for name, keyword in (
        ("ge", "minimum"),
        ("gt", "exclusiveMinimum"),
        ("le", "maximum"),
        ("lt", "exclusiveMaximum"),
        ("min_length", "minLength"),
        ("pattern", "pattern"),
    ):
        bound = option.bound(name)
        if bound is not None:
            found[keyword] = bound
    return {**found, **described}


def main() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["definitions"] = {**schema["definitions"], **definitions()}
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
