"""How good the time left is that a run and the service report: jobs of three kinds, the end predicted at each moment.

    python benchmarks/forecast.py --save benchmarks/results/forecast.md

A prediction counts as good within 15% of the time that the whole job took, from 20% of its tokens on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE), str(HERE / "src")]

from batchwright import run  # noqa: E402 - this checkout's
from batchwright.jobs.job_run import RunProgress  # noqa: E402
from benchmarks.attacks.service import serving  # noqa: E402

_GENERATED = "batchwright_engine_generated_tokens_total"
MOMENTS = 50
"""Moments of each job that are evaluated, evenly spread over its tokens."""
NEAR = 0.15
WORDS = (
    "the", "river", "runs", "over", "old", "stones", "while", "people", "talk", "about", "weather", "and", "machines",
    "that", "count", "batches",
)  # fmt: skip


class Reported(NamedTuple):
    """What was reported at one moment."""

    at: float
    seconds_left: float | None
    tokens: int
    """Tokens generated until then."""


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def chat(draw: random.Random) -> dict[str, Any]:
    question = text(draw, int(draw.lognormvariate(3.3, 0.8)) + 3)
    return {"messages": [{"role": "user", "content": f"{question}?"}], "max_tokens": 256}


def mixed(draw: random.Random) -> dict[str, Any]:
    words, most = draw.choice([5, 20, 60, 300, 700]), draw.choice([8, 32, 64, 256])
    return {"messages": [{"role": "user", "content": text(draw, words)}], "max_tokens": most}


def failing(draw: random.Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": text(draw, 30)}]
    if draw.random() < 0.5:
        return {"messages": messages, "temperature": 77}
    return {"messages": messages, "max_tokens": draw.choice([32, 128])}


def write_job(path: Path, kind: Callable[[random.Random], dict[str, Any]], lines: int, seed: int) -> None:
    """Write an OpenAI batch file."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for number in range(lines):
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": kind(draw)}
            file.write(json.dumps(line) + "\n")


KINDS: dict[str, tuple[Callable[[random.Random], dict[str, Any]], int]] = {
    "chat": (chat, 400), "mixed": (mixed, 400), "half of the lines fail": (failing, 800),
}  # fmt: skip


def reported_by_run(source: Path, folder: Path, model: str) -> Iterator[Reported]:
    """Run the job with `batchwright.run`."""
    reported: list[Reported] = []

    def look(progress: RunProgress) -> None:
        if progress.phase == "running":
            reported.append(Reported(time.monotonic(), progress.seconds_left, progress.generated_tokens))

    run(source, folder / "out.jsonl", model=model, max_num_seqs=64, kv_memory="1GB", progress=look)
    return iter(reported)


def reported_by_service(source: Path, folder: Path, model: str) -> Iterator[Reported]:
    """Make a server compute the job, and poll it twice a second."""
    flags = ["--model", model, "--max-num-seqs", "64", "--kv-memory", "1GB"]
    with serving(HERE, folder, flags, None) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        uploaded = client.post("/v1/files", files={"file": source.read_bytes()}, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": uploaded, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).raise_for_status().json()
        while batch["status"] in ("validating", "in_progress"):
            batch = client.get(f"/v1/batches/{batch['id']}").json()
            figures = client.get("/metrics").text.splitlines()
            tokens = sum(float(line.split()[-1]) for line in figures if line.startswith(_GENERATED))
            if batch["status"] == "in_progress":
                yield Reported(time.monotonic(), batch["progress"]["eta_seconds"], int(tokens))
            time.sleep(0.5)


def measure(reported: Sequence[Reported]) -> dict[str, float]:
    """Compare the end of a job with its predictions."""
    began, end, whole = reported[0].at, reported[-1].at, reported[-1].tokens
    errors = []
    for moment in range(MOMENTS // 5, MOMENTS):
        at, left, _ = next(each for each in reported if each.tokens >= whole * moment / MOMENTS)
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
    rows = [
        "| reported by | job | lines | s | near | median error | worst error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for source_name, follow in {"run": reported_by_run, "the service": reported_by_service}.items():
        for name, (kind, lines) in KINDS.items():
            for seed in range(arguments.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    source = Path(folder) / "in.jsonl"
                    write_job(source, kind, lines, seed)
                    found = measure([*follow(source, Path(folder), arguments.model)])
                rows.append(
                    f"| {source_name} | {name} | {lines:,} | {found['seconds']:.0f} | {found['near']:.0%} | "
                    f"{found['median']:.1%} | {found['worst']:.1%} |"
                )
                print(rows[-1], flush=True)
    table = "\n".join(rows)
    print(table)
    if arguments.save is not None:
        arguments.save.write_text(
            "# The time left that a run and the service report\n\n"
            f"`python benchmarks/forecast.py --seeds {arguments.seeds}`, on two cores. Near: share of the moments,\n"
            "from 20% of the generated tokens on, at which the predicted end was within 15% of the time that the\n"
            f"whole job took. Errors are shares of that time.\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
