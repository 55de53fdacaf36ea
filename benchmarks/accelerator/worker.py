"""A process that measures sections, one after another, and is terminated when one of them takes too long."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from benchmarks.accelerator.results import Result, Section

GRACE_S = 10.0
"""Extra seconds for work that notices by itself that its time is over."""
_SHOWN = 120


class SectionFailed(Exception):
    """A section raised, ended its process, or did not finish in time; what it had measured before remains."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's message about a section that raised."""

    reason: str


Target: TypeAlias = Callable[[Connection, str, str, Path], None]


class Worker:
    """Starts a process when there is a section to measure and none runs: at first, and after one that failed.

    `folder` is an empty folder for its files. `target(pipe, shape, device, folder)` is what the process runs.
    """

    def __init__(self, shape: str, device: str, folder: Path, target: Target) -> None:
        self._arguments = (shape, device, folder)
        self._target = target
        self._process: BaseProcess | None = None
        self._pipe: Connection

    def measure(self, section: Section, limit: float) -> Iterator[Result]:
        """Yield the results of `section` as they arrive.

        Raises `SectionFailed`, at the latest if it has not ended `GRACE_S` after `limit` seconds.
        """
        self._start()
        ends = time.monotonic() + limit + GRACE_S
        try:
            self._pipe.send((section, limit))
            while self._pipe.poll(max(0.0, ends - time.monotonic())):
                message = self._pipe.recv()
                if message is None:
                    return
                if isinstance(message, Failure):
                    raise SectionFailed(message.reason)
                yield message
            raise SectionFailed(f"not ended after {limit + GRACE_S:.0f} s")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.close()
            raise SectionFailed("its process died") from None
        except SectionFailed:
            self.close()  # memory may be lost, or the device's state
            raise

    def close(self) -> None:
        """End the process. May be called again."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._pipe.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=self._target, args=(other, *self._arguments), daemon=True)
        self._process.start()
        other.close()  # so that the end of the process is the end of the pipe


def serve(pipe: Connection, shape: str, device: str, folder: Path) -> None:
    """Measure what is requested until the other side hangs up."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched
    from batchwright.engine.bodies.load import choose_device
    from benchmarks.accelerator.sections import Bench
    from benchmarks.accelerator.shapes import SHAPES

    bench = Bench(SHAPES[shape], choose_device(device), folder)
    while True:
        try:
            section, limit = pipe.recv()
        except EOFError:
            return
        try:
            for result in bench.run(section, limit):
                pipe.send(result)
            pipe.send(None)
        except Exception as error:  # whatever it is, it concerns only this section
            traceback.print_exc()
            pipe.send(Failure(short(error)))


def short(error: BaseException) -> str:
    """An error in one line of a table."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
