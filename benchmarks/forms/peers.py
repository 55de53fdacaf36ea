"""vLLM and the grammar libraries that it includes, in separate processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import jsonschema_rs

from benchmarks.forms.mask_times import LIBRARIES, Figures, Question
from benchmarks.forms.rounds import Round, schema_of_a_book
from benchmarks.forms.vllm_answers import FormJob, FormOutcome
from benchmarks.throughput.process import ROOT, Worker, WorkerFailed
from benchmarks.throughput.systems import System, vllm_systems
from benchmarks.throughput.workers.protocol import Options

_PATIENCE_S = 240


class Vllm:
    """vLLM with the model loaded, in the fastest of its ways."""

    def __init__(self, worker: Worker, prompts: Sequence[Sequence[int]]) -> None:
        self._worker = worker
        self._prompts = [list(prompt) for prompt in prompts]
        self.settings = f"vLLM {worker.ready['version']}, guidance backend, compact JSON, {worker.ready['settings']}"

    @classmethod
    def fastest(
        cls, folder: Path, model: Path, prompts: Sequence[Sequence[int]], most: int, say: Callable[[str], None]
    ) -> Vllm | None:
        """Start it in each way and keep the one that is fastest in a round; None if there is no vLLM."""
        options: Options = {
            "model": str(model), "precision": "", "kv_gib": 2, "max_num_seqs": len(prompts), "attention": "",
            "profile": False,
        }  # fmt: skip
        started: list[tuple[float, Vllm]] = []
        with ExitStack() as stack:
            for system in vllm_systems(folder, {}):
                found = cls._start(system, options, prompts)
                stack.callback(found.close)
                found.answer(16, 0.7, schema=True)  # all is compiled after it, and the prompts are kept
                seconds = found.answer(most, 0.7, schema=True).seconds
                say(f"{found.settings}: {len(prompts) / seconds:.2f} lines/s")
                started.append((seconds, found))
            started.sort(key=lambda each: each[0])
            stack.pop_all()
        for _, slower in started[1:]:
            slower.close()
        return started[0][1] if started else None

    @classmethod
    def _start(cls, system: System, options: Options, prompts: Sequence[Sequence[int]]) -> Vllm:
        taken: Options = {**options, "precision": system.precision}
        return cls(Worker("benchmarks.forms.vllm_answers", system.python, taken, system.environment), prompts)

    def answer(self, most: int, temperature: float, *, schema: bool) -> Round:
        """Compute all prompts with answers of at most `most` tokens, or exactly `most` if they have no schema."""
        job: FormJob = {
            "prompts": self._prompts,
            "outputs": [most] * len(self._prompts),
            "schema": json.dumps(schema_of_a_book()) if schema else None,
            "temperature": temperature,
        }
        outcome = cast(FormOutcome, self._worker.run(job))
        valid = count_valid(outcome["texts"]) if schema else None
        return Round(outcome["seconds"], len(self._prompts), sum(map(len, outcome["tokens"])), valid)

    def close(self) -> None:
        """End the process."""
        self._worker.close()


def count_valid(texts: Sequence[str]) -> int:
    """Return how many of `texts` the schema of a book accepts. Raises ValueError for one that ended and it does not."""
    validator, valid = jsonschema_rs.Draft202012Validator(schema_of_a_book()), 0
    for text in texts:
        with suppress(json.JSONDecodeError):  # cut off by max_tokens
            validator.validate(json.loads(text))
            valid += 1
    return valid


def mask_rows(
    folder: Path, model: Path, width: int, answers: Sequence[Sequence[int]], schemas: Sequence[dict[str, Any]]
) -> list[tuple[str, Figures]]:
    """Measure each library. Raises `WorkerFailed`."""
    found = []
    for library in LIBRARIES:
        question: Question = {
            "library": library,
            "model": str(model),
            "width": width,
            "answered": json.dumps(schema_of_a_book()),
            "answers": [list(answer) for answer in answers],
            "schemas": [json.dumps(schema) for schema in schemas],
        }
        command = [str(folder / "bin" / "python"), "-m", "benchmarks.forms.mask_times"]
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, cwd=ROOT, timeout=_PATIENCE_S
        )
        if done.returncode:
            raise WorkerFailed(f"{library}: {done.stderr[-2000:]}")
        found.append((library, cast(Figures, json.loads(done.stdout.splitlines()[-1]))))
    return found
