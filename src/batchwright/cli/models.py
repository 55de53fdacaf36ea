"""`batchwright models`: list, fetch and locate models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from batchwright.engine_config import EngineConfig
from batchwright.inference.loading import prepare_kernels, resolve_generating
from batchwright.models import ModelStatus, inventory, resolve
from batchwright.models.cache import Progress

app = typer.Typer(name="models", help="List, fetch and locate models.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(help="A built-in name, a local folder, a .gguf file, or a hub id (org/name).", show_default=False),
]


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead of a table.")] = False,
) -> None:
    """Show the built-in models and the converted GGUF files."""
    models = inventory()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(models, enc_hook=str), indent=2).decode())
    else:
        Console().print(_table(models))


@app.command("pull")
def pull_model(name: Name) -> None:
    """Fetch a model, convert it and compile the kernels where needed, and print the path of its folder."""
    with _progress() as progress:
        path = resolve_generating(name, EngineConfig(), progress)
        with suppress(ModuleNotFoundError):  # of the extra `engine`, without which nothing is computed here
            prepare_kernels(progress)
    typer.echo(path)


@app.command("path")
def print_path(name: Name) -> None:
    """Print the path of a model that was pulled. Fetches nothing; exit status 2 when it is not there."""
    typer.echo(resolve(name, pull=False, weights="either"))


def _table(models: list[ModelStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="fold")
    table.add_column("kind")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("licence")
    table.add_column("in cache")
    table.add_column("description")
    words = {"cached": "yes", "absent": "no", "damaged": "damaged"}
    for model in models:
        size = f"{model.size / 1e6:.0f} MB"
        cells = [model.name, model.kind, size, model.licence or "?", words[model.state], model.description]
        table.add_row(*map(escape, cells))
    return table


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show progress as a spinner on a terminal, else as lines; on stderr, so that stdout holds only the result."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda line: typer.echo(line, err=True)
        return
    with console.status("looking into the cache") as status:
        yield lambda line: status.update(escape(line))
