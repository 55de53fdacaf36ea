"""The service as a process that can be started, killed and waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from benchmarks.batching.http.run import free_port
from tests import forked
from typer.testing import CliRunner

from batchwright.cli.main import app

_START = 180.0
"""Seconds; on two busy cores an import, and what an engine loads, may take long."""


class ServiceDied(Exception):
    """It ended before it was ready, and nobody had asked it to."""


class Service:
    """`batchwright serve` on a data folder. It keeps its port from one start to the next."""

    def __init__(self, data: Path, database: str, backend: str, extra: Sequence[str] = ()) -> None:
        self.data = data
        self.store = ["--data", str(data), "--database", database]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._backend = ["--backend", backend]
        if backend != "engine":
            self._backend += ["--model", "oracle"]
        self._flags = [*self.store, *self._backend, "--port", str(self.port), *extra]
        self.keys: list[str | None] = [None]
        """Of the tenants that use it; without keys there is one."""
        self.limited = False
        """Whether these have quotas."""
        self._process: subprocess.Popen[bytes] | forked.Command | None = None
        self.log = data.parent / "service.log"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServiceDied("it was never started")
        return self._process.pid

    def start(self, environment: Mapping[str, str] | None = None, before: Callable[[], None] | None = None) -> None:
        """`before` runs in a new process, not a fork, to set its limits."""
        if before is None:
            self._process = self._forked("serve", *self._flags, environment=environment)
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_BATCHWRIGHT, "serve", *self._flags],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=before,
                start_new_session=True,
            )

    async def ready(self) -> bool:
        """Wait until it takes work. False: it was killed by a signal first, as a crash point does.

        Raises `ServiceDied` when it ended in any other way, or takes too long.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + _START
        async with httpx.AsyncClient() as client:
            while loop.time() < limit:
                if not self.alive:
                    return self._ended_by_kill()
                try:
                    if (await client.get(f"{self.url}/ready", timeout=5)).status_code == 200:
                        return True
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.02)
        raise ServiceDied(f"not ready after {_START} s:\n{self.tail()}")

    def _ended_by_kill(self) -> bool:
        if self._process is not None and self._process.returncode == -signal.SIGKILL:
            return False
        raise ServiceDied(f"it ended by itself:\n{self.tail()}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def stop(self) -> int:
        """SIGTERM; its exit status."""
        if self._process is None:
            return 0
        self._process.terminate()
        return await asyncio.to_thread(self._process.wait, 60)

    async def killed(self, within: float) -> bool:
        """Whether it has died by SIGKILL of its own within so many seconds. Raises `ServiceDied` as `ready`."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + within
        while loop.time() < limit:
            if not self.alive:
                return not self._ended_by_kill()
            await asyncio.sleep(0.01)
        return False

    def worker(self, *flags: str) -> forked.Command:
        """Another process on the same store that computes batches, without HTTP."""
        return self._forked("jobs", "work", *self.store, *self._backend, *flags)

    def _forked(self, *arguments: str, environment: Mapping[str, str] | None = None) -> forked.Command:
        return forked.start(arguments, self.log, output=self.log, environment={**os.environ, **(environment or {})})

    def command(self, *words: str) -> str:
        """What another command says on the same store. Raises what it raises."""
        # Not in this thread, where an event loop may run.
        with ThreadPoolExecutor(1) as apart:
            done = apart.submit(CliRunner().invoke, app, [*words, *self.store], catch_exceptions=False).result()
        assert done.exit_code == 0, done.output
        return done.stdout

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


_BATCHWRIGHT = [sys.executable, "-m", "batchwright"]
