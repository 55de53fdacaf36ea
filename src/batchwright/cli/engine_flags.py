"""The options of the engine as flags of a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from batchwright.engine_config import EngineConfig, EngineOption, engine_options
from batchwright.errors import InputError

_PARAMETER = "engine"


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A command in which a flag for each option of the engine takes the place of the parameter `engine`.

    `command` is given an `EngineConfig` in it. An option that is out of range is an `InputError`.
    """
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    flags = [_flag(option) for option in engine_options()]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        chosen = {flag.name: value for flag in flags if (value := given.pop(flag.name)) is not None}
        try:
            config = EngineConfig(**chosen)
        except ValueError as error:
            raise InputError(str(error)) from error
        command(**given, **{_PARAMETER: config})

    own = [
        each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for each in signature.parameters.values()
        if each.name != _PARAMETER
    ]
    wrapped.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *flags], return_annotation=None
    )
    wrapped.__annotations__ = {each.name: each.annotation for each in (*own, *flags)} | {"return": None}
    del wrapped.__wrapped__
    return wrapped


def _flag(option: EngineOption) -> inspect.Parameter:
    flag, kind = "--" + option.name.replace("_", "-"), _kind(option.annotation)
    default = {True: "true", False: "false"}.get(option.default, option.default)
    told = option.help if option.default is None else f"{option.help} (default: {default})"
    common: dict[str, Any] = {"help": told, "rich_help_panel": option.group, "show_default": False}
    annotation: Any
    if kind is bool:
        annotation = Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", **common)]
    elif get_origin(kind) is Literal:
        annotation = Annotated[str | None, typer.Option(flag, metavar="|".join(get_args(kind)), **common)]
    elif option.name == "kv_memory":
        annotation = Annotated[str | None, typer.Option(flag, metavar="SIZE", **common)]
    else:
        annotation = Annotated[kind | None, typer.Option(flag, **common)]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _kind(annotation: Any) -> Any:
    """The type of a value that is not None."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next(each for each in kinds if each is not type(None))
