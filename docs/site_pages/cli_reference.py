"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from batchwright.cli.main import app

_SETTINGS = ("batchwright serve", "batchwright jobs work")
"""Commands whose flags are the settings of the service."""
_TYPES = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


def page() -> str:
    """Return the page."""
    parts = ["# Command line", "`--help` after any command says the same."]
    for path, command in _commands("batchwright", typer.main.get_command(app)):
        parts += _section(path, command)
    return "\n\n".join(parts) + "\n"


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the commands below `command`, each with the words that call it."""
    for name, each in getattr(command, "commands", {}).items():
        yield f"{path} {name}", each
        yield from _commands(f"{path} {name}", each)


def _section(path: str, command: Any) -> list[str]:
    help_text = re.sub(r"^ +", "", command.help or "", flags=re.MULTILINE)
    if getattr(command, "commands", None) is not None:
        return [f"## {path}", help_text]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join([path, *(_argument(each) for each in arguments), "[OPTIONS]"])
    parts = [f"{'##' if path.count(' ') == 1 else '###'} {path}", f"```text\n{usage}\n```", help_text]
    if path in _SETTINGS:
        parts.append("Its flags are the [settings](../settings.md).")
    if options:
        rows = [f"| {_names(each)} | {_cell(each.help)}{_default(each)} |" for each in options]
        parts.append("\n".join(["| option | meaning |", "| --- | --- |", *rows]))
    return parts


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    name = f"{name}…" if parameter.nargs == -1 else name
    return name if parameter.required else f"[{name}]"


def _names(option: Any) -> str:
    annotation = option.type_descriptor.annotation
    metavar = "" if option.is_flag else f" {option.metavar or _TYPES.get(annotation, 'VALUE')}"
    names = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{name}{metavar}`".replace("|", "\\|") for name in names)


def _default(option: Any) -> str:
    default = option.default
    if option.is_flag or default in (None, "", (), []) or callable(default) or "efault" in (option.help or ""):
        return ""
    return f" Default: `{getattr(default, 'value', default)}`."


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")
