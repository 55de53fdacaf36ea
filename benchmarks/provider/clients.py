"""The clients that are measured, and how each is started."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.provider.systems.protocol import Task

ROOT = Path(__file__).resolve().parents[2]
OURS = "batchwright"


@dataclass(frozen=True, slots=True)
class System:
    """A client."""

    name: str
    """Name on the command line."""
    title: str
    """Title in tables."""
    environment: str | None = None
    """The folder of its virtual environment under `.bench`; None: this one."""

    @property
    def python(self) -> Path:
        """Path of its interpreter, which may not exist."""
        if self.environment is None:
            return Path(sys.executable)
        return ROOT / ".bench" / self.environment / "bin" / "python"

    @property
    def installed(self) -> bool:
        """Whether it can be started."""
        return self.python.exists()

    def command(self, task: Task) -> list[str]:
        """Return the command that starts it."""
        if self.name == OURS:
            return [str(self.python), "-m", "batchwright", "run", *_our_arguments(task)]
        return [str(self.python), "-m", f"benchmarks.provider.systems.{self.name}", json.dumps(asdict(task))]


def _our_arguments(task: Task) -> list[str]:
    arguments = [task.job, "-o", task.output, "--backend", task.url, "--model", task.model, "--quiet"]
    limits = {"--rpm": task.rpm, "--tpm": task.tpm, "--backend-concurrency": task.concurrency}
    for flag, value in limits.items():
        if value is not None:
            arguments += [flag, str(value)]
    return arguments


SYSTEMS = {
    system.name: system
    for system in (
        System(OURS, "batchwright"),
        System("litellm", "litellm router", "litellm"),
        System("cookbook", "cookbook's processor", "plain"),
        System("async_batch_llm", "async-batch-llm", "async-batch-llm"),
        System("saturate", "saturate", "saturate"),
        System("tenacity", "semaphore, tenacity", "plain"),
    )
}
