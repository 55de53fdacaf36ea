"""Time that a job takes on engines, from a sample of its lines: their steps are simulated, and the rest is in pace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from batchwright.simulation.fleet import Fleet, SimulationResult, simulate
from batchwright.simulation.replica import Served
from batchwright.simulation.requests import SimulatedRequest

MOST_STEPPED = 100_000
"""Tokens of answers that are simulated one by one, which takes a second."""
_LEAST_ROUNDS = 8
"""Lines for each place, without which a sample would be all beginning and end."""
_MIDDLE = (0.25, 0.75)
"""Shares of the work between which it goes at the pace of a job that does not end."""


def job_seconds(
    fleet: Fleet,
    lines: Sequence[SimulatedRequest],
    total: int,
    *,
    planned: bool = True,
    most_stepped: int = MOST_STEPPED,
) -> float:
    """Return the seconds from the first line to the last of a job of `total` requests, of which `lines` are a sample.

    Of a sample that is smaller than the job, or has more answers than are worth simulating, the middle tells the pace
    at which all further lines are done. A beginning that prompts share is computed once however many there are: half of
    the sample is simulated too, and what the other half adds is what further lines add. `planned` as in `simulate`;
    `most_stepped`: tokens of answers that are simulated. Raises ValueError for a job without lines.
    """
    if not lines or total < len(lines):
        raise ValueError(f"{len(lines)} lines of {total}: must be at least one, and not more than there are")
    chosen = _affordable(lines, most_stepped, fleet.sizes.max_num_seqs * fleet.replicas)
    whole = simulate(fleet, [], chosen, planned=planned)
    further = total - len(chosen)
    if not further:
        return whole.seconds
    half = chosen[::2]
    before = simulate(fleet, [], half, planned=planned) if len(half) < len(chosen) else SimulationResult()
    prompt = (_computed(whole) - _computed(before)) / (len(chosen) - (len(half) if before.served else 0))
    answer = sum(each.output_tokens for each in lines) / len(lines)
    prompt_seconds, answer_seconds = fleet.token_seconds
    return whole.seconds + _pace(fleet, whole) * further * (prompt_seconds * prompt + answer_seconds * answer)


def _affordable(lines: Sequence[SimulatedRequest], most_stepped: int, places: int) -> Sequence[SimulatedRequest]:
    """Return some of `lines`, evenly spaced: as many as `most_stepped` tokens allow, or as a sample needs."""
    answers = sum(each.output_tokens for each in lines)
    wanted = min(len(lines), max(_LEAST_ROUNDS * places, int(len(lines) * most_stepped / answers)))
    return [lines[number * len(lines) // wanted] for number in range(wanted)]


def _computed(result: SimulationResult) -> int:
    """Return the tokens of prompts that were computed, not found in a cache."""
    return sum(each.request.prompt_tokens - each.cached_tokens for each in result.served)


def _pace(fleet: Fleet, result: SimulationResult) -> float:
    """Return the seconds for each second of work by `Fleet.token_seconds`, in the middle of a simulated job."""
    served = sorted((each for each in result.served if not each.refused), key=lambda each: each.ended_at)
    done = [0.0, *accumulate(_work(fleet, each) for each in served)]
    times = [0.0, *(each.ended_at for each in served)]
    first, last = (next(place for place, work in enumerate(done) if work >= share * done[-1]) for share in _MIDDLE)
    if times[last] <= times[first]:
        first, last = 0, -1
    return (times[last] - times[first]) / max(done[last] - done[first], 1e-9)


def _work(fleet: Fleet, served: Served) -> float:
    prompt, answer = fleet.token_seconds
    return prompt * (served.request.prompt_tokens - served.cached_tokens) + answer * served.request.output_tokens
