"""Both databases, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
from tests.postgres import PostgresServer
from tests.store.support import Play, play
from tests.stores import in_memory


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared(postgres: PostgresServer) -> str:
    """The URL of a database for all tests."""
    return postgres.new_database()


@pytest.fixture
def empty(shared: str) -> Callable[[], str]:
    """Empties that database, and gives its URL."""

    def emptied() -> str:
        with psycopg.connect(shared, autocommit=True) as connection:
            rows = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'batchwright' AND tablename <> 'schema_version'"
            ).fetchall()
            if rows:
                connection.execute(f"TRUNCATE {', '.join(f'batchwright.{name}' for (name,) in rows)}".encode())
        return shared

    return emptied


@pytest.fixture
def emptied(empty: Callable[[], str]) -> str:
    """The URL of an empty store in PostgreSQL."""
    return empty()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """Of an empty store."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("folder") / "store.db")
    found: str = request.getfixturevalue("emptied")
    return found


@pytest.fixture(name="play")
def _play(url: str) -> Play:
    return partial(play, url)
