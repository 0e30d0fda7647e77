"""The options of plait as values.schema.json has them: `python -m helm.schema` writes them anew.

Owns which options a chart's user may set; what the chart sets itself is left out.
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from server.config import GROUPS, NOT_FOR, ServeConfig

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
    return [
        name
        for name, field in ServeConfig.model_fields.items()
        if _extra(field, "group") in GROUPS[role]
        and name not in NOT_FOR[role]
        and name not in OF_THE_CHART
    ]


def options_of(names: typing.Iterable[str]) -> dict[str, Any]:
    """A JSON schema of an object with these options."""
    fields = ServeConfig.model_fields
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _property(fields[name]) for name in names},
    }


def definitions() -> dict[str, Any]:
    """Those that all roles have, and those of each."""
    of_role = {role: option_names(role) for role in ROLES}
    shared = [name for name in of_role["frontend"] if all(name in n for n in of_role.values())]
    return {
        "options": options_of(shared),
        **{f"{role}Options": options_of(names) for role, names in of_role.items()},
    }


def _property(field: FieldInfo) -> dict[str, Any]:
    kind = _kind(field.annotation)
    described = {"description": field.description or ""}
    if typing.get_origin(kind) is Literal:
        return {"enum": list(typing.get_args(kind)), **described}
    if typing.get_origin(kind) is tuple:
        return {"type": "array", "items": {"type": "string", "pattern": "^[^,]+$"}, **described}
    names = {bool: "boolean", int: "integer", float: "number"}
    found: dict[str, Any] = {"type": names.get(kind, "string")}
    for part in field.metadata:
        for name, keyword in (
            ("ge", "minimum"),
            ("gt", "exclusiveMinimum"),
            ("le", "maximum"),
            ("lt", "exclusiveMaximum"),
            ("min_length", "minLength"),
            ("pattern", "pattern"),
        ):
            bound = getattr(part, name, None)
            if bound is not None:
                found[keyword] = bound
    return {**found, **described}


def _kind(annotation: Any) -> Any:
    """The type without `| None`."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return next(t for t in typing.get_args(annotation) if t is not type(None))
    return annotation


def _extra(field: FieldInfo, key: str) -> str:
    extra = field.json_schema_extra
    return str(extra[key]) if isinstance(extra, dict) else ""


def main() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["definitions"] = {**schema["definitions"], **definitions()}
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
