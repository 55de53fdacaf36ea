"""Jobs in virtual time: their makespan over its bound, by the order of their lines.

The scheduler and the planner are the engine's, as in `batchwright simulate`; steps cost what `DEVICES` says.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from batchwright.engine_config import EngineConfig
from batchwright.scheduling.sizes import EngineSizes
from batchwright.scheduling.step_costs import StepCosts
from batchwright.simulation.fleet import Fleet, simulate
from batchwright.simulation.requests import SimulatedRequest
from benchmarks.replicas.jobs import LIMIT, lengths

PLACES, LINES = 256, 4000
PLANNED, ARRIVAL = "planned", "in the order of the input"
_PARTS, _SEEDS = 4, 3
_BLOCK = 16
_SYSTEM, _TASKS, _EXAMPLES = 20, 20, 30
"""Blocks of the system prompt, number of tasks, and blocks of the examples of each."""


@dataclass(frozen=True, slots=True)
class Device:
    """The cost of steps in seconds, and how much one computes."""

    name: str
    step: float
    prompt: float
    """Seconds per prompt token."""
    row: float
    """Seconds per answer token."""
    key: float
    """Seconds per key that it reads."""
    max_batch_tokens: int

    def fleet(self) -> Fleet:
        """Return one engine on this device."""
        costs = StepCosts((self.step, self.prompt, 0.0, self.row, self.key, 0.0, 0.0, 0.0))
        sizes = EngineSizes(self.max_batch_tokens, max_num_seqs=PLACES, max_model_len=32_768, num_blocks=62_500)
        return Fleet(1, sizes, EngineConfig(), costs, seed=None)


DEVICES = (
    Device("GPU", step=8e-3, prompt=50e-6, row=30e-6, key=40e-9, max_batch_tokens=8192),
    Device("cores", step=10e-3, prompt=1e-3, row=2e-3, key=1e-6, max_batch_tokens=512),
)
"""About an 8B model in bfloat16 on one large GPU, and one of 0.5B on two cores."""


@dataclass(frozen=True, slots=True)
class Job:
    """Lines, and where they come from."""

    name: str
    is_trace: bool
    """Whether lengths are those of chats, which share nothing."""
    lines: list[SimulatedRequest]


def jobs(trace: Path | None) -> list[Job]:
    """Parts of a chat service's trace, and tasks of equally long prompts behind a common system prompt.

    Raises ValueError for a trace with fewer requests than a part has.
    """
    pairs = lengths(trace, random.Random(0))
    if len(pairs) < LINES:
        raise ValueError(f"{trace}: {len(pairs):,} requests; a job takes {LINES:,}")
    chats = [
        SimulatedRequest(prompt_tokens=prompt, output_tokens=max(1, answer), max_tokens=LIMIT)
        for prompt, answer in pairs
    ]
    name = "chats, drawn lengths" if trace is None else "chats of the trace"
    return [
        *(
            Job(f"{name}, part {part + 1}", True, chats[part * LINES :][:LINES])
            for part in range(min(_PARTS, len(chats) // LINES))
        ),
        *(Job(f"{_TASKS} tasks, seed {seed}", False, _of_tasks(seed)) for seed in range(_SEEDS)),
    ]


def _of_tasks(seed: int) -> list[SimulatedRequest]:
    """Lines of tasks in turn, which all begin with a system prompt; answers have lengths around one of their task."""
    draw = random.Random(seed)
    centres = [math.exp(draw.uniform(math.log(20), math.log(600))) for _ in range(_TASKS)]
    found = []
    for number in range(LINES):
        task = number % _TASKS
        examples = [1000 * (task + 1) + block for block in range(_EXAMPLES)]
        answer = min(LIMIT, max(1, round(centres[task] * draw.lognormvariate(0.0, 0.5))))
        blocks = (*range(_SYSTEM), *examples)
        found.append(
            SimulatedRequest(
                prompt_tokens=_BLOCK * len(blocks) + draw.randint(40, 80),
                output_tokens=answer,
                max_tokens=LIMIT,
                blocks=blocks,
                block_tokens=_BLOCK,
            )
        )
    return found


def bound(device: Device, lines: Sequence[SimulatedRequest]) -> float:
    """Seconds that no order of the lines can beat on the device.

    Every prompt token is computed once, shared ones once for all lines; every answer token but the first takes a row
    and reads its keys; and there are as many steps as these rows need places, or as the longest answer has tokens. The
    scheduler charges a prompt token that is computed alone as a row, which is less on some devices: there are few.
    """
    seen: set[tuple[int, ...]] = set()
    prompts = rows = keys = 0
    for each in lines:
        shared = 0
        while shared < len(each.blocks) and each.blocks[: shared + 1] in seen:
            shared += 1
        seen.update(each.blocks[: end + 1] for end in range(shared, len(each.blocks)))
        prompts += each.prompt_tokens - shared * each.block_tokens
        later = each.output_tokens - 1
        rows += later
        keys += later * each.prompt_tokens + later * (later + 1) // 2
    steps = max(max(each.output_tokens for each in lines), math.ceil(rows / PLACES))
    return device.step * steps + device.prompt * prompts + device.row * rows + device.key * keys


def makespans(device: Device, lines: Sequence[SimulatedRequest]) -> dict[str, float]:
    """Makespan over its bound in each order: planned, that of the input, and by the lengths that only we know.

    Planned jobs keep no answers in the cache, as with `run`; no prompt here begins with one.
    """
    shortest = sorted(lines, key=lambda each: each.output_tokens)
    given = [replace(each, expected_tokens=each.output_tokens) for each in lines]
    least, fleet = bound(device, lines), device.fleet()
    return {
        PLANNED: simulate(fleet, [], lines, planned=True).seconds / least,
        "planned, lengths given": simulate(fleet, [], given, planned=True).seconds / least,
        ARRIVAL: simulate(fleet, [], lines).seconds / least,
        "shortest first": simulate(fleet, [], shortest).seconds / least,
        "longest first": simulate(fleet, [], shortest[::-1]).seconds / least,
    }


def measured(trace: Path | None) -> list[tuple[Device, Job, dict[str, float]]]:
    """Each job on each device, computed on all cores."""
    cases = list(product(DEVICES, jobs(trace)))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as apart:
        found = apart.map(makespans, [device for device, _ in cases], [job.lines for _, job in cases])
        return [(*case, each) for case, each in zip(cases, found, strict=True)]
