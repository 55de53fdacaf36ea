"""Commands whose flags are the settings of the service. Those need the extra `server`: so only when one is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchwright.errors import MissingExtra

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""The settings of the command: it reads its arguments itself."""


def run_with_settings(
    context: typer.Context,
    run: Callable[..., None],
    *,
    help_text: str,
    without: Collection[str] = (),
    flags: Collection[inspect.Parameter] = (),
) -> None:
    """Read the arguments of `context` and call `run` with the settings, and with `flags` of the command's own.

    `without`: settings that are no flags of this command. Raises `MissingExtra`, and `InputError` for a setting.
    """
    try:
        from batchwright.service.settings import setting_fields
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{context.info_name} needs {error.name}; install it: pip install 'batchwright[server]'"
        ) from error

    def command(config: Path | None = None, **given: Any) -> None:
        from batchwright.service.setting_sources import load_settings

        own = {flag.name: given.pop(flag.name) for flag in flags}
        run(load_settings(given, config=config), **own)

    settings = [_parameter(name, field) for name, field in setting_fields().items() if name not in without]
    parameters = [*flags, *settings, _config_parameter()]
    command.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=help_text)(command)
    app(context.args, prog_name=context.command_path)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    from batchwright.service.settings import group_of, shown_default, type_name

    flag, kind = "--" + name.replace("_", "-"), type_name(field)
    default = shown_default(field)
    told = f"{field.description} (default: {default})" if default else field.description
    common: dict[str, Any] = {"help": told, "rich_help_panel": group_of(field), "show_default": False}
    annotation: Any
    if field.annotation is bool:
        annotation = Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", **common)]
    else:
        metavar = kind if "|" in kind else kind.upper()
        annotation = Annotated[str | None, typer.Option(flag, metavar=metavar, **common)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _config_parameter() -> inspect.Parameter:
    from batchwright.service.setting_sources import CONFIG_VARIABLE, default_config

    told = f"TOML file of settings, else the one that {CONFIG_VARIABLE} names, else {default_config()} if there is one."
    annotation = Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help=told, show_default=False, rich_help_panel="Operation"),
    ]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
