"""A file of many windows, in which lines that begin alike are far apart, and what reading it in another order finds."""

from __future__ import annotations

import json
import random
import resource
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchwright.clock import MonotonicClock
from batchwright.jobs.job import Job
from batchwright.jobs.line_orders import EngineOrder
from batchwright.jobs.ordered_records import ordered_records
from batchwright.jobs.sources import Record
from batchwright.jobs.spec import JobSpec

_WORDS = 120
"""Words of each document."""
_NAME = 40
"""Bytes by which a document is distinguished from others."""


@dataclass(frozen=True, slots=True)
class LongFile:
    """What was found for a file."""

    lines: int
    found_as_it_is: float
    """Share of the lines whose document an earlier line of their window had."""
    found_in_order: float
    seconds: float
    """Seconds of the passes that find the order."""
    bytes_a_line: float
    """Bytes per line by which the process grew meanwhile."""


def measured(documents: int, questions: int, seed: int = 0) -> LongFile:
    """Measure a file that asks all documents one question, then all of them the next, and so on."""
    window, most_bytes = EngineOrder.window
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        _write(path, documents, questions, seed)
        spec = JobSpec(inputs=(str(path),), output=str(path.with_name("out.jsonl")), model=None)
        with Job(spec, MonotonicClock()) as job:
            as_it_is = _found(job.source.records(), window)
            before, began = _peak(), time.perf_counter()
            with ordered_records(job, window, most_bytes) as records:
                seconds, grown = time.perf_counter() - began, _peak() - before
                if records is None:
                    raise RuntimeError("no order of the file was found to be better")
                in_order = _found(records, window)
    lines = documents * questions
    return LongFile(lines, as_it_is, in_order, seconds, grown / lines)


def _write(path: Path, documents: int, questions: int, seed: int) -> None:
    words = [f"word{number}" for number in range(2000)]
    with path.open("w", encoding="utf-8") as file:
        for question in range(questions):
            draw = random.Random(seed)
            for number in range(documents):
                text = f"{number:0{_NAME}} " + " ".join(draw.choices(words, k=_WORDS))
                file.write(json.dumps({"prompt": f"{text}\nQuestion {question}?"}) + "\n")


def _found(records: Iterable[Record], window: int) -> float:
    lines = found = 0
    held = set[bytes]()
    for place, record in enumerate(records):
        if place % window == 0:
            held.clear()
        document = bytes(record.content)[: _NAME + 20] if isinstance(record.content, bytes) else b""
        found += document in held
        held.add(document)
        lines += 1
    return found / lines


def _peak() -> int:
    """Most bytes that the process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
