"""The long form: `python -m tests.crash --kills 1000 --database postgresql`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from tests.crash.campaign import Campaign, start_campaign_service
from tests.crash.outside import Outside
from tests.postgres import PostgresServer

_SHOWN_EVERY = 10


def main(
    kills: Annotated[int, typer.Option(min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="Of the load, and of moments and places.")] = 1,
) -> None:
    """Kill the service under load so many times, half on SQLite and half on PostgreSQL, and print what came of it."""
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres:
        databases = {"SQLite": str(Path(folder) / "batchwright.db"), "PostgreSQL": postgres.new_database()}
        for share, (name, database) in enumerate(databases.items()):
            figures = asyncio.run(_campaign(Path(folder) / name, database, (kills + 1 - share) // 2, seed, name))
            print(f"{name}\n{figures}\n", flush=True)


async def _campaign(folder: Path, database: str, kills: int, seed: int, name: str) -> object:
    def show(done: int) -> None:
        if sys.stderr.isatty() or done % _SHOWN_EVERY == 0:
            print(f"{name}: {done} of {kills} kills", file=sys.stderr, flush=True)

    async with Outside() as outside:
        return await Campaign(start_campaign_service(folder, database, outside), outside, seed, show).run(kills)


if __name__ == "__main__":
    typer.run(main)
