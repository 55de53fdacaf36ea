"""A private PostgreSQL server for tests: in a folder of its own, on a Unix socket, run by a user without privileges."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
import pytest


def _programs() -> Path:
    """The folder of `initdb` and `pg_ctl`. Skips the test where they are not installed."""
    on_path = shutil.which("pg_ctl")
    if on_path:
        return Path(on_path).resolve().parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: float(path.parts[4]))
    if not found:
        pytest.skip("PostgreSQL is not installed: no pg_ctl on the PATH or under /usr/lib/postgresql")
    return found[-1].parent


def _account() -> pwd.struct_passwd | None:
    """Whom to run it as, since PostgreSQL refuses root; None: as ourselves."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


class PostgresServer:
    """A running server, as a context manager. Skips the test where it cannot be run."""

    def __init__(self) -> None:
        self._bin = _programs()
        self._account = _account()
        # Not pytest's own folder: the other user cannot pass through it, and the path of a socket must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="pg"))
        self._data = self._folder / "data"
        if self._account is not None:
            os.chown(self._folder, self._account.pw_uid, self._account.pw_gid)
        self._names = itertools.count(1)

    def __enter__(self) -> Self:
        try:
            self._run("initdb", "-D", str(self._data), "-U", "batchwright", "-A", "trust", "-E", "UTF8", "--no-sync")
            with (self._data / "postgresql.conf").open("a", encoding="utf-8") as file:
                file.write(
                    f"listen_addresses = ''\nunix_socket_directories = '{self._folder}'\n"
                    "fsync = off\nshared_buffers = 32MB\nmax_connections = 60\n"
                )
            self.start()
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            pytest.skip(f"PostgreSQL cannot be run here: {error}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop("immediate")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test{next(self._names)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql://batchwright@/{database}?host={self._folder}"

    def start(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-l", str(self._folder / "log"), "-w", "-t", "60", "start")

    def stop(self, mode: str = "fast") -> None:
        """`mode`: as of `pg_ctl`; "immediate" is a crash, from which the next start recovers."""
        self._run("pg_ctl", "-D", str(self._data), "-m", mode, "-w", "-t", "60", "stop")

    def restart(self) -> None:
        """As after a crash."""
        self.stop("immediate")
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        """Raises OSError when the program fails."""
        user, group = (self._account.pw_uid, self._account.pw_gid) if self._account else (None, None)
        with tempfile.TemporaryFile() as output:
            # Not through a pipe, which the server would keep open.
            ended = subprocess.run(
                [self._bin / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env={"PATH": os.defpath, "LC_ALL": "C"},
                user=user,
                group=group,
                extra_groups=[] if self._account else None,
                check=False,
            )
            if ended.returncode:
                output.seek(0)
                raise OSError(f"{program}: {output.read().decode(errors='replace').strip()[-500:]}")
