"""The messages between a worker and the harness: one JSON object per line, on pipes.

The harness passes the options as the first argument and sends jobs; the worker answers each, first with `ready`.
Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NotRequired, TypeAlias, TypedDict

WITHOUT_ZENTORCH = "BENCH_WITHOUT_ZENTORCH"
"""Variable of the environment that keeps vLLM from zentorch where it is installed."""


class Options(TypedDict):
    """How to load the model. The same for every system, so that none has an advantage."""

    model: str
    """Folder in transformers format; for a system that does not read it, a file or folder of its own."""
    precision: str
    """Of the weights: bf16, int8 of batchwright, or that of the system's own file."""
    kv_gib: int
    max_num_seqs: int
    attention: str
    """Only for batchwright."""
    profile: bool
    """Only for batchwright: time the parts of a step."""
    rates_folder: NotRequired[str]
    """Only for batchwright: report the bound of each job, as a profile. Rates of the machine are stored here."""


class Ready(TypedDict):
    version: str
    settings: str
    """What a reader must know about how it runs, in a few words."""


class Job(TypedDict):
    prompts: list[list[int]]
    outputs: list[int]
    """Exact number of tokens to generate for each prompt."""


class Outcome(TypedDict):
    seconds: float
    tokens: list[list[int]]
    """Generated token ids of each prompt."""
    profile: dict[str, float]
    """Seconds in each piece, and `steps`; or the figures of the bound. Empty unless asked for."""


Answer: TypeAlias = Callable[[Job], Outcome]


def no_profile() -> dict[str, float]:
    return {}


def timed(
    generate: Callable[[Job], list[list[int]]], take_profile: Callable[[], dict[str, float]] = no_profile
) -> Answer:
    """Time `generate`, which gives the token ids of each prompt.

    `take_profile` gives what was measured since it was last called.
    """

    def answer(job: Job) -> Outcome:
        take_profile()
        began = time.perf_counter()
        tokens = generate(job)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": tokens, "profile": take_profile()}

    return answer


def serve(load: Callable[[Options], tuple[Ready, Answer]]) -> None:
    """Load the model, then answer jobs until the harness hangs up."""
    # Libraries print; their output must not be mixed with the answers.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(message: object) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    try:
        ready, answer = load(json.loads(sys.argv[1]))
        say(ready)
        for line in sys.stdin:
            say(answer(json.loads(line)))
    except Exception:
        say({"error": traceback.format_exc()})
        raise


def from_json(line: str) -> dict[str, Any]:
    """One answer. Raises ValueError for anything that is not a JSON object."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, got {line[:100]!r}")
    return message
