"""The job that all clients are given, and a clairvoyant client's plan for it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.provider.amounts import Usage
from benchmarks.provider.answers import CHARACTERS_PER_TOKEN, tokens_of
from benchmarks.provider.plan import Plan, Work, best_plan
from benchmarks.provider.scenarios import MAX_TOKENS, Scenario
from benchmarks.provider.server import MODEL

_MOST_PER_SECOND = 25
_PROMPT_TOKENS, _PROMPT_SPREAD = 80, 0.6
_WORDS = "Sea, wind, sand and the long light of an evening in the north; a boat, a bell, a letter that came too late. "


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the job."""

    number: int
    system: str
    prompt: str

    @property
    def text(self) -> str:
        """All text that counts as input."""
        return self.system + self.prompt

    def body(self) -> dict[str, object]:
        """The request, in OpenAI's form."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS}


def lines(scenario: Scenario) -> Iterator[Line]:
    """Endless lines: prompts of log-normal lengths, the same for every client."""
    chance = random.Random(scenario.law.seed)
    system = _filler(scenario.shared_prefix)
    number = 0
    while True:
        tokens = max(round(chance.lognormvariate(math.log(_PROMPT_TOKENS), _PROMPT_SPREAD)), 8)
        yield Line(number, system, f"{_filler(tokens)} [line {number}]")
        number += 1


def _filler(tokens: int) -> str:
    characters = tokens * CHARACTERS_PER_TOKEN
    return (_WORDS * (characters // len(_WORDS) + 1))[:characters]


def work_of(scenario: Scenario, line: Line) -> list[Work]:
    """The attempts at a line until it is answered, as counted by a client that knows all answers."""
    is_charged_late = scenario.limits().is_charged_late
    attempts: list[Work] = []
    while True:
        fate = scenario.law.draw(line.number, len(attempts), MAX_TOKENS)
        asked = tokens_of(line.text)
        actual = Usage(1, asked, fate.output_tokens) if fate.billed else Usage(1)
        estimate = Usage(1, asked, actual.output_tokens if is_charged_late else MAX_TOKENS)
        attempts.append(Work(estimate, actual, fate.seconds))
        if fate.answered:
            return attempts


@dataclass(frozen=True, slots=True)
class Job:
    """Lines, and when a client that knows everything has them all."""

    lines: Sequence[Line]
    tokens_of_lines: Sequence[int]
    """Tokens of each line's prompt and answer."""
    plan: Plan
    """Plan of all attempts, in the better of two orders: as they come, and the longest first."""
    window: float | None = None
    """Seconds of the windows in which the provider counts, if it does so."""

    @property
    def until(self) -> float:
        """When the share of the allowed tokens is taken: as the plan ends, or at the end of that window."""
        if self.window is None:
            return self.plan.makespan
        return math.ceil(self.plan.makespan / self.window) * self.window

    def write(self, path: Path) -> None:
        """Write the job as a file for OpenAI's batch API, which each client reads in its own way."""
        with path.open("wb") as file:
            for line in self.lines:
                named = {"custom_id": f"line-{line.number}", "method": "POST", "url": "/v1/chat/completions"}
                file.write(msgspec.json.encode(named | {"body": line.body()}) + b"\n")


def job_of(scenario: Scenario, seconds: float) -> Job:
    """As many lines as a clairvoyant client can get answered in about `seconds`."""
    taken: list[Line] = []
    every: list[Work] = []
    counts: list[int] = []
    for line in lines(scenario):
        if len(taken) >= seconds * _MOST_PER_SECOND:
            break
        taken.append(line)
        every += work_of(scenario, line)
        counts.append(len(every))
    trial = best_plan(scenario.limits().foreseen(), every)
    latency = sum(work.seconds for work in every) / len(every)
    fitting = sum(trial.admitted[count - 1] <= seconds - latency for count in counts)
    kept = taken[: max(fitting, 1)]
    attempts = [work_of(scenario, line) for line in kept]
    work = [each for tried in attempts for each in tried]
    orders = (work, sorted(work, key=lambda each: -each.seconds))
    plan = min((best_plan(scenario.limits().foreseen(), order) for order in orders), key=lambda each: each.makespan)
    answers = [tried[-1].actual for tried in attempts]
    return Job(kept, [usage.input_tokens + usage.output_tokens for usage in answers], plan, scenario.window)
