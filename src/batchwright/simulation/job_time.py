"""Estimate of a job's duration and KV cache: a sample of its lines is simulated, and the rest extrapolated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from batchwright.scheduling.sizes import BLOCK_SIZE
from batchwright.scheduling.slo import StepShape
from batchwright.simulation.fleet import Fleet, SimulationResult, simulate
from batchwright.simulation.replica import Served
from batchwright.simulation.requests import SimulatedRequest

MOST_STEPPED = 200_000
"""Tokens of answers that are simulated one by one, which takes a second or two."""
_LEAST_ROUNDS = 4
"""Least number of lines for each place: a smaller sample would be all beginning and end."""
_MIDDLE = (0.25, 0.75)
"""Shares of the work between which a job goes at the pace of one that does not end."""


@dataclass(frozen=True, slots=True)
class JobTime:
    """What a job takes."""

    seconds: float
    """Seconds from the first line to the last."""
    kv_tokens: int | None
    """Most tokens held in the KV caches of all engines at a time, with what lines share held once; None if none of the
    lines were simulated."""


def job_time(
    fleet: Fleet,
    lines: Sequence[SimulatedRequest],
    total: int,
    prompt_tokens: float,
    *,
    planned: bool = True,
    stepped: int | None = None,
) -> JobTime:
    """Return what a job of `total` requests takes, of which `lines` are a sample.

    `prompt_tokens`: tokens of all prompts that are computed, not found in a cache. All `lines` must be computable. If a
    sample is smaller than the job, or has more answers than are worth simulating, the middle of what is simulated gives
    the pace at which all further work is done. If so few lines could be simulated that they would be all beginning and
    end, the time is that of engines whose places are all taken, but at least that of the longest answer. `planned` as
    in `simulate`; `stepped`: lines that are simulated, 0 for none; None: as many as `lines_to_step` returns. Raises
    ValueError for a job without lines.
    """
    if not lines or total < len(lines):
        raise ValueError(f"{len(lines)} lines of {total}: must be at least one, and not more than there are")
    if stepped is None:
        stepped = lines_to_step(fleet, lines, total)
    if not stepped:
        return JobTime(_seconds_of_work(fleet, lines, total, prompt_tokens), None)
    chosen = [lines[number * len(lines) // stepped] for number in range(stepped)]
    result = simulate(fleet, [], chosen, planned=planned)
    kv_tokens = BLOCK_SIZE * sum(each.kv_blocks_peak for each in result.replicas)
    further = total - len(chosen)
    if not further:
        return JobTime(result.seconds, kv_tokens)
    computed = sum(each.request.prompt_tokens - each.cached_tokens for each in result.served)
    prompt_seconds, answer_seconds = fleet.token_seconds
    answer = _mean_answer(lines)
    work = prompt_seconds * max(0.0, prompt_tokens - computed) + answer_seconds * answer * further
    return JobTime(result.seconds + _pace(fleet, result) * work, kv_tokens)


def lines_to_step(fleet: Fleet, lines: Sequence[SimulatedRequest], total: int, most_stepped: int = MOST_STEPPED) -> int:
    """Return how many of `lines`, a sample of `total`, to simulate; 0 if those would be too few to give a pace.

    `most_stepped`: about the most tokens of answers that are simulated.
    """
    most = min(len(lines), int(most_stepped / _mean_answer(lines)))
    return most if most >= min(total, _LEAST_ROUNDS * fleet.sizes.max_num_seqs * fleet.replicas) else 0


def _mean_answer(lines: Sequence[SimulatedRequest]) -> float:
    return sum(each.output_tokens for each in lines) / len(lines)


def _seconds_of_work(fleet: Fleet, lines: Sequence[SimulatedRequest], total: int, prompt_tokens: float) -> float:
    keys = sum(each.output_tokens * (each.prompt_tokens + each.output_tokens // 2) for each in lines)
    answers = sum(each.output_tokens for each in lines)
    places = fleet.sizes.max_num_seqs
    rows = max(1, min(places, total // fleet.replicas))
    step = fleet.costs.seconds(StepShape(0, 0, rows, rows * keys // answers, rows))
    steps = max(
        answers * total / len(lines) / (rows * fleet.replicas), float(max(each.output_tokens for each in lines))
    )
    return fleet.token_seconds[0] * prompt_tokens / fleet.replicas + step * steps


def _pace(fleet: Fleet, result: SimulationResult) -> float:
    """Return the seconds for each second of work by `Fleet.token_seconds`, in the middle of a simulated job."""
    served = sorted(result.served, key=lambda each: each.ended_at)
    done = [0.0, *accumulate(_work(fleet, each) for each in served)]
    times = [0.0, *(each.ended_at for each in served)]
    first, last = (next(place for place, work in enumerate(done) if work >= share * done[-1]) for share in _MIDDLE)
    if times[last] <= times[first]:
        first, last = 0, -1
    return (times[last] - times[first]) / max(done[last] - done[first], 1e-9)


def _work(fleet: Fleet, served: Served) -> float:
    prompt, answer = fleet.token_seconds
    return prompt * (served.request.prompt_tokens - served.cached_tokens) + answer * served.request.output_tokens
