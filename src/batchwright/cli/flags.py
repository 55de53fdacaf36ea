"""Flags of commands that are generated: those of the engine's options, of the service's settings and of its store."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from batchwright.engine_config import EngineConfig, EngineOption, engine_options
from batchwright.errors import InputError


def with_flags(
    command: Callable[..., None],
    parameter: str,
    flags: Sequence[inspect.Parameter],
    value_of: Callable[[dict[str, Any]], object],
) -> Callable[..., None]:
    """Return `command` with `flags` in place of `parameter`, which is given `value_of` the flags' values by name."""
    hints = get_type_hints(command, include_extras=True)
    kept = [
        each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(command).parameters.values()
        if each.name != parameter
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        value = value_of({flag.name: given.pop(flag.name) for flag in flags})
        command(**given, **{parameter: value})

    del wrapped.__wrapped__
    set_parameters(wrapped, [*kept, *flags])
    return wrapped


def set_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Make `parameters` the signature that Typer sees."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with a flag for each option of the engine in place of its parameter `engine: EngineConfig`.

    An option that is out of range is an `InputError`.
    """

    def config_of(given: dict[str, Any]) -> EngineConfig:
        try:
            return EngineConfig(**{name: value for name, value in given.items() if value is not None})
        except ValueError as error:
            raise InputError(str(error)) from error

    return with_flags(command, "engine", [_engine_flag(option) for option in engine_options()], config_of)


def _engine_flag(option: EngineOption) -> inspect.Parameter:
    kinds = get_args(option.annotation) if get_origin(option.annotation) in (Union, UnionType) else (option.annotation,)
    kind = next(each for each in kinds if each is not type(None))
    metavar = None
    if get_origin(kind) is Literal:
        kind, metavar = str, "|".join(get_args(kind))
    elif option.name == "kv_memory":
        kind, metavar = str, "SIZE"
    default = "" if option.default is None else str(option.default)
    return flag(
        option.name, kind, option.help, option.group, default.lower() if kind is bool else default, metavar=metavar
    )


def flag(
    name: str,
    kind: Any,
    help: str,  # noqa: A002 - as in Typer
    group: str | None = None,
    default: str = "",
    **more: Any,
) -> inspect.Parameter:
    """Return the parameter of an option `--name`, whose value is a `kind`, or None where it is not given.

    `group`: its heading in the help. `default`: what leaving it out means; empty where that needs no mention.
    """
    dashed = name.replace("_", "-")
    names = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    told = f"{help} (default: {default})" if default else help
    option = typer.Option(names, help=told, rich_help_panel=group, show_default=False, **more)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
