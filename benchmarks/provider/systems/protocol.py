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
"""What a client that has to be given a number of requests under way is given where no limit is known."""
SECONDS_PER_REQUEST = 1.5
"""What a user who knows the model says that a request takes."""
PROMPT_TOKENS = 100
"""And what a prompt has."""
MAX_ATTEMPTS = 10
"""Tries, where a client has to be given their number: enough that a fault in two requests is survived."""


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
        """As many requests under way as the limits that it was given allow."""
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
    """The file of a client's answers: a line for each as soon as it is there."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def add(self, name: str, content: str | None) -> None:
        """Write an answer down, or with None that the client gave a line up."""
        self._file.write(json.dumps({"custom_id": name, "content": content}) + "\n")
        self._file.flush()


def serve(run: Callable[[Task, Answers], str], version: str) -> None:
    """Do what the command line says, and print the version and what `run` says of the client's settings."""
    task = Task(**json.loads(sys.argv[1]))
    with Path(task.output).open("w") as file:
        settings = run(task, Answers(file))
    print(json.dumps({"version": version, "settings": settings}))
