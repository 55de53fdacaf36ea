"""The log of requests for simulations: times and lengths, but none of their text.

A line of JSON for each answer: `at` (Unix seconds of its arrival), `class` (online or batch), `prompt_tokens`,
`cached_tokens` (those of them that were found in the cache) and `output_tokens`. Each is written at once, by a single
`write` to the end of the file, so lines of several processes do not mix, and a crash loses none that was written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from batchwright.errors import InputError
from batchwright.inference.inference import Call
from batchwright.limiting.estimates import completions_of_request, sequences_of_request
from batchwright.service.observability.logs import logger

_MOST_LINES = 64
"""Most lines that one request writes, however many answers it asks for."""


class TraceLog:
    """Log of one process. Raises `InputError` for a file that cannot be written."""

    def __init__(self, path: Path, unix_time: Callable[[], float] = time.time) -> None:
        self._unix_time = unix_time
        self._path = path
        self._failed = False
        """Whether the last line could not be written, which is logged once."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")  # the machine went down while the last line was written
        except OSError as error:
            raise InputError(f"trace_log={str(path)!r} cannot be written: {error.strerror or error}") from error

    def record(self, call: Call, seconds: float, prompt: int, cached: int, generated: int) -> None:
        """Record that a call was answered `seconds` after it arrived, with these numbers of tokens.

        A call for several answers writes a line for each, with its share of the tokens.
        """
        if min(prompt, generated) < 1:
            return
        answers = max(1, sequences_of_request(call.endpoint, call.body))
        prompts = max(1, answers // max(1, completions_of_request(call.endpoint, call.body)))
        line = json.dumps(
            {
                "at": round(self._unix_time() - seconds, 4),
                "class": call.traffic,
                "prompt_tokens": max(1, prompt // prompts),
                "cached_tokens": cached // prompts,
                "output_tokens": max(1, generated // answers),
            },
            separators=(",", ":"),
        )
        try:
            os.write(self._file, f"{line}\n".encode() * min(answers, _MOST_LINES))
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning("trace_log_not_written", path=str(self._path), error=str(error))
            self._failed = True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
