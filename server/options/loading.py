"""From flags, PLAIT_ variables and a YAML file to ServeConfig: which wins, what an error says.

Also reads the API keys, which may lie in a file of their own. Knows no option but those that only
go with others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from server.options.config import OPTIONS, ConfigError, ServeConfig
from server.options.option import ENV_PREFIX, Option, did_you_mean

# Variables that are plait's and no options: where models lie, a file of options, what a pull reads.
OTHER_VARIABLES = ("HOME", "CONFIG", "PULL_SOURCE")


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

    origins = _Origins(flags, path)
    try:
        layered = _Layered(**flags)
    except ValidationError as error:
        lines = [_describe(str(e["loc"][0]), e["input"], origins) for e in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None
    _check_host_tier(layered, origins)
    return ServeConfig.model_construct(layered.model_fields_set, **dict(layered))


def misspelt_variables() -> list[str]:
    """What to say of variables that are none of plait's and close to one that is. Others' variables
    may begin alike: those of a Kubernetes service named plait do."""
    known = [*OTHER_VARIABLES, *(name.upper() for name in OPTIONS)]
    found = []
    for variable in sorted(os.environ):
        prefix, name = variable[: len(ENV_PREFIX)].upper(), variable[len(ENV_PREFIX) :].upper()
        if prefix != ENV_PREFIX or name in known:
            continue
        if meant := did_you_mean(name, known, prefix=ENV_PREFIX):
            found.append(f"{variable}: means nothing here; {meant}")
    return found


def api_keys(config: ServeConfig) -> tuple[str, ...]:
    """Every accepted key, of --api-key and --api-key-file; empty: no key is needed.

    Raises ConfigError when the file cannot be read or holds no key: an operator who named a
    key file must not end up with an open server.
    """
    keys = [key.get_secret_value() for key in config.api_key]
    is_given = "api_key" in config.model_fields_set or OPTIONS["api_key"].variable in os.environ
    if is_given and not keys:
        raise ConfigError("--api-key: holds no key; expected one or more, or no such option")
    if config.api_key_file is not None:
        where = f"--api-key-file {config.api_key_file}"
        try:
            lines = config.api_key_file.expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {error}; expected a text file") from error
        from_file = [line.strip() for line in lines if line.strip()]
        if not from_file:
            raise ConfigError(f"{where}: holds no key; expected one key a line")
        keys += from_file
    return tuple(dict.fromkeys(keys))


@dataclass(frozen=True, slots=True)
class _Origins:
    """Where values may have been given: as flags, as variables, or in the file at `path`."""

    flags: Mapping[str, Any]
    path: str | None

    def of(self, option: Option) -> str:
        """Where the value that counts was given."""
        if option.name in self.flags:
            return option.flag
        if any(key.upper() == option.variable for key in os.environ):
            return option.variable
        return f"{option.name} in {self.path}"


def _describe(name: str, value: object, origins: _Origins) -> str:
    """One line: where the value was given, the value, what is accepted."""
    option = OPTIONS.get(name)
    if option is None:
        return f"unknown option {name!r}; {_known_keys()}"
    shown = "" if option.is_secret else f" {value!s}"
    return f"{origins.of(option)}{shown}: expected {option.accepts}"


def _check_host_tier(config: ServeConfig, origins: _Origins) -> None:
    """Raises ConfigError for options of a host tier that is not there. One that was turned off by
    name leaves its options where they are."""
    if "enable_hierarchical_cache" in config.model_fields_set:
        return
    given = [
        f"{origins.of(option)} {getattr(config, name)}"
        for name, option in OPTIONS.items()
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
        text = path.expanduser().read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        content = None if root is None else loader.construct_document(root)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}; expected a readable YAML file") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{where}: not valid YAML: {error.problem}{at}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: holds a {type(content).__name__}; expected a mapping")
    assert isinstance(root, yaml.MappingNode)
    names = Counter(str(key.value).replace("-", "_") for key, _ in root.value)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"{where}: {twice[0]} is there {names[twice[0]]} times; expected once")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in OPTIONS:
            meant = did_you_mean(name, OPTIONS, otherwise=_known_keys())
            raise ConfigError(f"{where}: unknown key {key!r}; {meant}")
        if value is not None:
            values[name] = value
    return values


def _known_keys() -> str:
    return f"expected one of {', '.join(OPTIONS)}"
