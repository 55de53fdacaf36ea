"""What a job would compute: its first requests as they would be sent, and the tokens of all prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchwright.errors import BatchwrightError, InvalidRequest
from batchwright.jobs.failures import Failures
from batchwright.jobs.job import Job
from batchwright.jobs.lines import BadLine
from batchwright.lines.batch_line import line_error
from batchwright.planning.identical import Repeats
from batchwright.request import Prompt

_SHOWN = 3
_BYTES_OF_A_TOKEN = 4
"""Bytes of English text that are about one token, for models whose tokenizer is elsewhere."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that a run would compute."""

    line: int
    custom_id: str
    endpoint: str
    body: Mapping[str, Any]
    prompt_tokens: int
    """Tokens of all its prompts; an estimate if the model is elsewhere."""
    text: str | None
    """The first prompt as the model gets it, chat template included; None if the model is elsewhere."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a job."""

    valid: int
    failures: Failures
    identical: int
    """Valid lines that need not be asked, since they ask the same as earlier ones."""
    prompt_tokens: int
    """Without those of the lines that need not be asked, which are `saved_prompt_tokens`."""
    saved_prompt_tokens: int
    longest: int
    """Tokens of the longest prompt."""
    first: list[PlannedRequest]


def plan(
    job: Job,
    tokenizer: Any | None,
    check: Callable[[str, Mapping[str, Any]], Sequence[Prompt]],
    add_cost: Callable[[str, Mapping[str, Any], int], None] | None = None,
    repeats: Repeats | None = None,
) -> Plan:
    """Check all lines of `job`, and count their prompt tokens with `tokenizer`; without one these are estimates.

    `check` returns the prompts of a body for an endpoint, and raises `InvalidRequest` if it cannot be computed.
    `add_cost` is called with the endpoint, the body and the prompt tokens of each valid line that is asked: of those
    that ask the same, by `repeats`, the first.
    """
    failures = Failures()
    first: list[PlannedRequest] = []
    valid = identical = tokens = saved = longest = 0
    asked: set[int] = set()
    for record in job.source.records():
        line = job.parser.parse(record)
        custom_id, duplicate = job.ids.assign(line.number, line.custom_id)
        error: Exception | None = line.error if isinstance(line, BadLine) else duplicate
        if error is None and not isinstance(line, BadLine):
            try:
                prompts = check(line.endpoint, line.body)
                counts = [_count(prompt, tokenizer) for prompt in prompts]
            except BatchwrightError as raised:
                error = raised
            else:
                valid += 1
                longest = max(longest, *counts, 0)
                group = None if repeats is None else repeats.group_of(line.number)
                if group in asked:
                    identical += 1
                    saved += sum(counts)
                    continue
                if group is not None:
                    asked.add(group)
                tokens += sum(counts)
                if add_cost is not None:
                    add_cost(line.endpoint, line.body, sum(counts))
                if len(first) < _SHOWN:
                    text = None if tokenizer is None else tokenizer.decode(tokenizer.encode(prompts[0]))
                    first.append(PlannedRequest(line.number, custom_id, line.endpoint, line.body, sum(counts), text))
        if error is not None:
            failures.add(line.number, custom_id, line_error(error))
    return Plan(valid, failures, identical, tokens, saved, longest, first)


def _count(prompt: Prompt, tokenizer: Any | None) -> int:
    if tokenizer is not None:
        encode: Callable[[Prompt], list[int]] = tokenizer.encode
        try:
            return len(encode(prompt))
        except BatchwrightError:
            raise
        except Exception as error:  # a tokenizer is foreign code
            raise InvalidRequest(f"the tokenizer refuses the prompt: {error}", param="prompt") from error
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    text = prompt if isinstance(prompt, str) else "".join(str(message.get("content")) for message in prompt)  # type: ignore[union-attr]
    return -(-len(text.encode(errors="replace")) // _BYTES_OF_A_TOKEN)
