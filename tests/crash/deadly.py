"""Processes that compute batches and die of some prompts: `python -m tests.crash.deadly DATA CALLS LIVES`.

One after the other, until one ends with status 0 because nothing is left to compute, LIVES at most; the status of each
is a line of the output. Each call is a line of the file CALLS, written before it begins.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from batchwright.inference.inference import Call
from batchwright.service.composition import open_services
from batchwright.service.settings import Settings
from batchwright.service.worker.worker import WorkerOptions

DEATHS = ("SIGKILL", "SIGSEGV", "exit")
"""A prompt that begins with one of these ends the process so."""
_SLOTS = 32


class _Deadly:
    """Answers a prompt with its capitals, after a moment."""

    models = ("deadly",)

    def __init__(self, calls: Path) -> None:
        self._calls = calls
        self._held = 0

    @property
    def wants(self) -> int:
        return _SLOTS - self._held

    async def answer(self, call: Call) -> dict[str, Any]:
        prompt: str = call.body["prompt"]
        with self._calls.open("a") as calls:
            calls.write(f"{prompt}\n")
        self._held += 1
        try:
            await asyncio.sleep(0.01)
            self._maybe_die(prompt.partition(" ")[0])
        finally:
            self._held -= 1
        return {
            "id": "cmpl",
            "object": "text_completion",
            "choices": [{"index": 0, "text": prompt.upper(), "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }

    def _maybe_die(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        if how in DEATHS:
            os.kill(os.getpid(), signal.Signals[how])

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


async def _work(data: Path, calls: Path) -> None:
    options = WorkerOptions(poll=0.1)
    async with open_services(Settings(data=data), inference=_Deadly(calls), options=options) as services:
        await services.worker.until_idle()


def _life(data: Path, calls: Path) -> int:
    """Run one process to its end, and return its status."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            asyncio.run(_work(data, calls))
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    for _ in range(int(sys.argv[3])):
        status = _life(Path(sys.argv[1]), Path(sys.argv[2]))
        print(status, flush=True)
        if status == 0:
            break
