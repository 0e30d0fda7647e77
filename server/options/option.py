"""One option: how it is declared, and what flags, variables, errors and --help make of it.

Knows no option by name and not where values come from.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

ENV_PREFIX = "PLAIT_"
_CLOSE = 0.75  # of 1; variables of others, which begin alike, are not as close to ours


def declare(group: str, default: object, help: str, accepts: str = "", **bounds: Any) -> Any:
    """A field of a class of options. `accepts` completes "expected …" where type and bounds do
    not."""
    extra: dict[str, Any] = {"group": group, "accepts": accepts}
    return Field(default, description=help, json_schema_extra=extra, **bounds)


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """What to say of a name that is none of the known, all without the prefix that they have where
    they are given; `otherwise` where it is close to none."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_CLOSE)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise


def split_commas(value: object) -> object:
    """["a,b", "c"] and "a,b,c" both mean three items."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [part.strip() for item in value for part in item.split(",") if part.strip()]
    return value


@dataclass(frozen=True, slots=True)
class Option:
    """A declared field as an operator meets it."""

    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def group(self) -> str:
        return self._extra("group")

    @property
    def kind(self) -> Any:
        """The type without `| None`."""
        annotation = self.field.annotation
        if typing.get_origin(annotation) in (types.UnionType, typing.Union):
            return next(t for t in typing.get_args(annotation) if t is not type(None))
        return annotation

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values there are; empty: it is not one of a few."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def is_secret(self) -> bool:
        return "SecretStr" in str(self.field.annotation)

    @property
    def help(self) -> str:
        """As argparse formats it."""
        field = self.field
        text = (field.description or "").replace("%", "%%")
        if field.default is None or field.default == () or field.annotation is bool:
            return text
        return f"{text} (default: {field.default})"

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        number = "SECONDS" if self.name.endswith("_s") else "X"
        return {int: "N", float: number, Path: "FILE"}.get(self.kind, "TEXT")

    @property
    def accepts(self) -> str:
        """What completes "expected …"."""
        if text := self._extra("accepts"):
            return text
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        if self.is_list:
            return "text, or a list of texts"
        noun = {int: "a whole number", float: "a number", Path: "a path"}
        return noun.get(self.kind, "non-empty text") + self._range()

    def bound(self, name: str) -> Any:
        """The bound that pydantic calls by this name, such as `ge`; None where there is none."""
        found = (getattr(part, name, None) for part in self.field.metadata)
        return next((bound for bound in found if bound is not None), None)

    def _range(self) -> str:
        """What completes "a number"."""
        least, most = self.bound("ge"), self.bound("le")
        above, below = self.bound("gt"), self.bound("lt")
        if least is not None:
            return f", {least} or more" if most is None else f" from {least} to {most}"
        if above is not None:
            return f" above {above}" if below is None else f" above {above} and below {below}"
        return ""

    def _extra(self, key: str) -> str:
        extra = self.field.json_schema_extra
        return str(extra[key]) if isinstance(extra, dict) else ""
