"""Memory stays flat however many lines there are."""

from __future__ import annotations

import json
import multiprocessing
import resource
from multiprocessing.queues import Queue
from pathlib import Path

from tests.long_form import examples

from batchwright.jobs.run import run

from .fakes import fake

LINES = examples(30_000, long=200_000)
MOST_GROWTH = examples(6, long=24) * 2**20
"""The input is four times this. What grows by design is the table of ids: 36 bytes a line."""


def write_input(path: Path, lines: int) -> None:
    """Every fourth line is a prompt; the others, which are quicker, are not JSON, and three times as long."""
    filling = "x" * 350
    with path.open("w") as file:
        for number in range(lines):
            prompt = json.dumps({"custom_id": f"id-{number}", "prompt": filling + str(number)})
            file.write(prompt + "\n" if number % 4 == 0 else 3 * filling + "\n")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(folder: str, ordered: bool, most: int, result: Queue[tuple[int, int]]) -> None:
    """Puts the lines done and the growth of this process's peak memory over that of a small run."""
    for name, lines in (("small", 2000), ("large", most)):
        write_input(Path(folder) / name, lines)
        before = peak()
        engine = fake(slots=256, keep_requests=False)
        report = run(
            Path(folder) / name, Path(folder) / f"{name}.out.jsonl", ordered=ordered, input_format="jsonl", model=engine
        )
    result.put((report.done, peak() - before))


def test_memory_is_flat(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=measure, args=(str(tmp_path), True, LINES, result))
    process.start()
    done, growth = result.get()
    process.join()
    assert (tmp_path / "large").stat().st_size > 3.8 * MOST_GROWTH
    assert done == LINES
    assert growth < MOST_GROWTH
