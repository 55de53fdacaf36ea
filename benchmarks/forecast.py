"""How good the time left is that a run shows: jobs of three kinds, and the end that was predicted at each moment.

    python benchmarks/forecast.py --save benchmarks/results/forecast.md

A prediction counts as good within 15% of the time that the whole job took, from 20% of its tokens on.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchwright import run
from batchwright.jobs.run import RunProgress

MOMENTS = 50
"""Moments of each job that are looked at, evenly spread over its tokens."""
NEAR = 0.15
WORDS = (
    "the", "river", "runs", "over", "old", "stones", "while", "people", "talk", "about", "weather", "and", "machines",
    "that", "count", "batches",
)  # fmt: skip


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def chat(draw: random.Random) -> dict[str, Any]:
    question = text(draw, int(draw.lognormvariate(3.3, 0.8)) + 3)
    return {"messages": [{"role": "user", "content": f"{question}?"}], "max_tokens": 256}


def mixed(draw: random.Random) -> dict[str, Any]:
    words, most = draw.choice([5, 20, 60, 300, 700]), draw.choice([8, 32, 64, 256])
    return {"prompt": text(draw, words), "max_tokens": most}


def failing(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {"prompt": "fails at once", "temperature": 77}
    return {"prompt": text(draw, 30), "max_tokens": draw.choice([32, 128])}


KINDS: dict[str, tuple[Callable[[random.Random], dict[str, Any]], int]] = {
    "chat": (chat, 400), "mixed": (mixed, 400), "half of the lines fail": (failing, 800),
}  # fmt: skip


def measure(kind: Callable[[random.Random], dict[str, Any]], lines: int, seed: int, model: str) -> dict[str, float]:
    """Run one job, and compare its end with what was predicted."""
    draw = random.Random(seed)
    told: list[tuple[float, float | None, int]] = []

    def look(progress: RunProgress) -> None:
        if progress.phase == "running":
            told.append((time.monotonic(), progress.seconds_left, progress.generated_tokens))

    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "in.jsonl"
        source.write_text("".join(json.dumps(kind(draw)) + "\n" for _ in range(lines)))
        run(source, Path(name) / "out.jsonl", model=model, max_num_seqs=64, kv_memory="1GB", progress=look)
    began, end = told[0][0], told[-1][0]
    whole = told[-1][2]
    errors = []
    for moment in range(MOMENTS // 5, MOMENTS):
        at, left, _ = next(each for each in told if each[2] >= whole * moment / MOMENTS)
        errors.append(1.0 if left is None else abs(at + left - end) / (end - began))
    return {
        "seconds": end - began,
        "near": sum(error <= NEAR for error in errors) / len(errors),
        "median": sorted(errors)[len(errors) // 2],
        "worst": max(errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, default=2, help="jobs of each kind")
    parser.add_argument("--save", type=Path, help="a file for the table")
    arguments = parser.parse_args()
    rows = ["| job | lines | s | near | median error | worst error |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, (kind, lines) in KINDS.items():
        for seed in range(arguments.seeds):
            found = measure(kind, lines, seed, arguments.model)
            rows.append(
                f"| {name} | {lines:,} | {found['seconds']:.0f} | {found['near']:.0%} | {found['median']:.1%} | "
                f"{found['worst']:.1%} |"
            )
            print(rows[-1], flush=True)
    table = "\n".join(rows)
    print(table)
    if arguments.save is not None:
        arguments.save.write_text(
            "# The time left that a run shows\n\n"
            f"`python benchmarks/forecast.py --seeds {arguments.seeds}`, on two cores. Near: share of the moments,\n"
            "from 20% of the generated tokens on, at which the predicted end was within 15% of the time that the\n"
            f"whole job took. Errors are shares of that time.\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
