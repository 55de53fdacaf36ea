"""Replicas as processes of this machine against one engine, and the memory that they share."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from batchwright.engine_config import EngineConfig
from batchwright.inference.replicas.opening import open_replicas

WORDS = (
    "river",
    "stone",
    "light",
    "under",
    "glass",
    "market",
    "seven",
    "garden",
    "window",
    "paper",
    "silver",
    "train",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Lines of a file."""

    name: str
    lines: int
    prompt_words: int
    answer: int
    prefix_words: int = 0
    """Words that all prompts begin with."""

    def write(self, path: Path, seed: int) -> None:
        draw = random.Random(seed)
        prefix = " ".join(draw.choices(WORDS, k=self.prefix_words))
        with path.open("w") as file:
            for _ in range(self.lines):
                prompt = f"{prefix} {' '.join(draw.choices(WORDS, k=self.prompt_words))}"
                file.write(json.dumps({"prompt": prompt.strip()}) + "\n")


WORKLOADS = (
    Workload("short prompts, 16 in, 128 out", 192, 16, 128),
    Workload("long prompts, 600 in, 32 out", 64, 600, 32),
)


@dataclass(slots=True)
class Rates:
    """Tokens a second of prompts and answers, by how many processes computed them; 0: the one that ran the job."""

    rates: dict[int, list[float]] = field(default_factory=dict)

    def median(self, replicas: int) -> float:
        return statistics.median(self.rates[replicas])

    def ratios(self, replicas: int) -> list[float]:
        """Return the ratio to one engine in each round."""
        return [rate / one for rate, one in zip(self.rates[replicas], self.rates[0], strict=True)]


def measure(workload: Workload, replicas: int, rounds: int) -> Rates:
    """Run a job with one engine on all cores and with replicas, in turns."""
    found = Rates({0: [], replicas: []})
    with TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(rounds):
            workload.write(folder / "in.jsonl", number)
            for each in found.rates:
                found.rates[each].append(_rate(folder, workload, each))
    return found


def _rate(folder: Path, workload: Workload, replicas: int) -> float:
    report = folder / "report.json"
    command = [sys.executable, "-m", "batchwright", "run", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    command += ["--overwrite", "-q", "--temperature", "0", "--max-tokens", str(workload.answer), "--ignore-eos"]
    command += ["--report", str(report), *(["--replicas", str(replicas)] if replicas else [])]
    subprocess.run(command, check=True)
    figures = json.loads(report.read_bytes())
    return float(
        (figures["prompt_tokens"] - figures["cached_tokens"] + figures["generated_tokens"]) / figures["loop_seconds"]
    )


def memory(replicas: int, model: str, config: EngineConfig) -> list[dict[str, float]]:
    """Return MiB of each of `replicas` after loading: its own, and its share of what it has in common with others."""
    return asyncio.run(_memory(replicas, model, config))


async def _memory(replicas: int, model: str, config: EngineConfig) -> list[dict[str, float]]:
    inference = await open_replicas(replicas, model, None, config)
    try:
        pids = [member.replica.pid for member in inference._members]  # type: ignore[attr-defined]  # noqa: SLF001
        return [_of_process(pid) for pid in pids]
    finally:
        await inference.close()


def _of_process(pid: int) -> dict[str, float]:
    fields = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    sizes = {name.rstrip(":"): int(size) / 1024 for name, size, *_ in fields}
    return {"rss": sizes["Rss"], "pss": sizes["Pss"], "private": sizes["Private_Clean"] + sizes["Private_Dirty"]}
