"""What a client is given and reports. Only the standard library: the environments of clients have nothing else."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

DEFAULT_CONCURRENCY = 32
"""Number of requests under way for a client that must be given one, if no limit is known."""
SECONDS_PER_REQUEST = 1.5
"""Seconds that a user who knows the model would expect of a request."""
PROMPT_TOKENS = 100
"""Tokens that such a user would expect of a prompt."""
MAX_ATTEMPTS = 10
"""Tries, if a client must be given their number: enough to survive a fault in every second request."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run. Limits are None where the client is not given any."""

    url: str
    """With `/v1`."""
    job: str
    """The path of a file in the form of OpenAI's batch input."""
    output: str
    """The path of the file for the answers."""
    model: str
    max_tokens: int
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None

    @property
    def useful_concurrency(self) -> int:
        """The number of requests under way that the given limits allow."""
        if self.concurrency is not None:
            return self.concurrency
        rates = [self.rpm, self.tpm and self.tpm / (self.max_tokens + PROMPT_TOKENS)]
        given = [rate for rate in rates if rate is not None]
        return max(math.ceil(min(given) / 60 * SECONDS_PER_REQUEST), 1) if given else DEFAULT_CONCURRENCY

    def bodies(self) -> list[tuple[str, dict[str, Any]]]:
        """The id and the request of each line."""
        with Path(self.job).open() as file:
            lines = [json.loads(line) for line in file]
        return [(line["custom_id"], line["body"]) for line in lines]


class Answers:
    """The file of a client's answers: a line for each as soon as it arrives."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def add(self, name: str, content: str | None) -> None:
        """Record an answer, or with None that the client gave up a line."""
        self._file.write(json.dumps({"custom_id": name, "content": content}) + "\n")
        self._file.flush()


def serve(run: Callable[[Task, Answers], str], version: str) -> None:
    """Do what the command line says, and print the version and what `run` says of the client's settings."""
    task = Task(**json.loads(sys.argv[1]))
    with Path(task.output).open("w") as file:
        settings = run(task, Answers(file))
    print(json.dumps({"version": version, "settings": settings}))
