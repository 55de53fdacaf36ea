"""Sources of settings: flags, the environment, a TOML file."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_config_path
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from batchwright.errors import InputError
from batchwright.service.settings import ENV_PREFIX, Settings, setting_fields

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"


def default_config() -> Path:
    """Return the path of the settings file that is read when none is named; it need not exist."""
    return user_config_path("batchwright", appauthor=False) / "batchwright.toml"


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def load_settings(flags: Mapping[str, Any] | None = None, *, config: Path | None = None) -> Settings:
    """Return settings from `flags` (by field name; None: not given), the environment and the TOML file.

    `config` is the file, else the one named by BATCHWRIGHT_CONFIG, else `default_config()` if it exists. Raises
    `InputError` that names the setting, its source, its value and what is wrong with it.
    """
    path = _config_path(config)
    sources: list[tuple[str, Mapping[str, Any]]] = [
        (str(path), {} if path is None else _read(path)),
        ("environment", EnvSettingsSource(Settings)()),
        ("flag", {name: value for name, value in (flags or {}).items() if value is not None}),
    ]
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, values in sources:
        merged.update(values)
        origins.update(dict.fromkeys(values, origin))
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise InputError("; ".join(_described(each, origins) for each in error.errors())) from None
    try:
        settings.engine.chosen()
    except ValueError as error:  # options that contradict each other
        raise InputError(str(error)) from None
    return settings


def _config_path(given: Path | None) -> Path | None:
    if named := given or os.environ.get(CONFIG_VARIABLE):
        return Path(named).expanduser()
    default = default_config()
    return default if default.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise InputError(f"settings file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"settings file {path}: must be UTF-8") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"settings file {path}: {error}") from error
    for key in values:
        if key not in Settings.model_fields:
            near = difflib.get_close_matches(key.replace("-", "_"), Settings.model_fields, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"the names are: {', '.join(setting_fields())}"
            raise InputError(f"settings file {path}: there is no setting {key!r}; {hint}")
    return values


def _described(error: Any, origins: Mapping[str, str]) -> str:
    """Describe one error, with the setting named as in its source: a flag, a variable or the file."""
    name = str(error["loc"][0]) if error["loc"] else ""
    origin = origins.get(name, "default")
    shown = {"flag": flag_of(name), "environment": ENV_PREFIX + name.upper()}.get(origin, f"{origin}: {name}")
    # An address may contain a password or a token, above all one that is refused because of it.
    secret = name in ("backend_api_key", "database") or (
        name == "backend" and not {"@", "?"}.isdisjoint(str(error["input"]))
    )
    value = "" if secret else f"={error['input']!r}"
    return f"{shown}{value}: {error['msg'].removeprefix('Value error, ')}"
