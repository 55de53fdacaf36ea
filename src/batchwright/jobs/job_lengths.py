"""Lengths of a job's lines, for simulations: of prompts as the tokenizer counts them, of answers as they may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from batchwright.errors import BatchwrightError, InputError, InvalidRequest
from batchwright.jobs.input_names import STREAM, expanded
from batchwright.jobs.lines import BadLine, Line, LineParser
from batchwright.jobs.sources import InputFormat, Record
from batchwright.jobs.spec import TABLES, JobSpec
from batchwright.jobs.table_sources import open_source
from batchwright.jobs.templates import Templates
from batchwright.lines.batch_line import decode_line, token_count
from batchwright.planning.prefix_tree import block_ids
from batchwright.request import SamplingParams
from batchwright.scheduling.sizes import BLOCK_SIZE
from batchwright.simulation.requests import SimulatedRequest
from batchwright.simulation.traces import MOST_TOKENS, logged
from batchwright.wire.fields import expected_tokens as body_expected_tokens
from batchwright.wire.identity import identity_of
from batchwright.wire.requests import COMPLETION_URL, ENCODER_URLS, RESPONSES_URL, read_generation
from batchwright.wire.text_responses import chat_of_response

_MAX_LINE_BYTES = 2**30
_LENGTHS = frozenset({"prompt_tokens", "output_tokens"})
"""Fields of a line that gives its lengths."""
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")


def job_lengths(
    name: str,
    tokenizer: Callable[[], Any],
    *,
    defaults: SamplingParams,
    longest: int,
    expected_tokens: int | None = None,
    input_format: str | None = None,
) -> list[SimulatedRequest]:
    """Return the lines of a job as requests to simulate, from files in any form that `run` reads, but no stream.

    The lengths of answers are those of result lines of an earlier run, where the file has these, or of lines such as
    `{"prompt_tokens": 300, "output_tokens": 120}`; else what a line expects itself, else `expected_tokens`, or without
    it the most that a line allows. `longest`: most tokens of a prompt and its answer. `tokenizer` is called when
    prompts are to be counted. `input_format`: see `run`; None: that of the extension. The prompt of a table's row is in
    its column `prompt`. Of lines that ask the same, only the first is computed, as by `run`. Lines that cannot be
    computed are left out. Raises `InputError` if there is no other, and what reading the file and loading the tokenizer
    raise.
    """
    spec = JobSpec(inputs=expanded([name]), output=STREAM, model=None, input_format=input_format)
    if spec.from_stream:
        raise InputError(f"{name} is a stream, of which no job to simulate is read: save it to a file first")
    resolved = spec.resolved_format()
    is_table = resolved in TABLES
    templates = Templates.of("{prompt}", None, None) if is_table else None
    parser = LineParser(resolved, templates, max_line_bytes=_MAX_LINE_BYTES)
    encode: Callable[[Any], list[int]] | None = None
    found: list[SimulatedRequest] = []
    asked: set[bytes] = set()
    """What lines have asked that have the same answer each time."""
    records = open_source(spec.paths, resolved, max_line_bytes=_MAX_LINE_BYTES).records()
    for record in records:
        fields = _fields_of(record, resolved)
        try:
            known = None if fields is None else _stated(fields, record.number)
        except ValueError as error:
            raise InputError(f"{name}, line {record.number}: {error}") from None
        if known is not None:
            found += known
            continue
        line = parser.parse(record)
        if isinstance(line, BadLine) or line.endpoint in ENCODER_URLS:
            continue
        if encode is None:
            encode = tokenizer().encode
        try:
            requests = [*simulated_requests(line, encode, defaults, longest)]
        except BatchwrightError:
            continue
        if (identity := identity_of(line.endpoint, line.body, defaults, here=True)) is not None:
            if identity in asked:
                continue
            asked.add(identity)
        found += [_expected(each, expected_tokens) for each in requests]
    if not found:
        needed = ": its rows need a column 'prompt', or 'prompt_tokens' and 'output_tokens'" if is_table else ""
        raise InputError(f"{name} has no line that can be computed{needed}")
    return found


def _fields_of(record: Record, input_format: InputFormat) -> Mapping[str, Any] | None:
    """Return the fields of a row or of a JSON object; None for what is neither. Whole numbers in a CSV are numbers."""
    if isinstance(record.content, Mapping):
        return {name: _number_of(value) if name in _LENGTHS else value for name, value in record.content.items()}
    if input_format == "txt" or not isinstance(record.content, bytes):
        return None
    try:
        return decode_line(record.content)
    except InvalidRequest:
        return None


def _number_of(value: object) -> object:
    return int(value) if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value) else value


def _expected(request: SimulatedRequest, tokens: int | None) -> SimulatedRequest:
    """A request whose answer is as long as its line says, else has so many `tokens`; None: as many as it may."""
    expected = tokens if request.expected_tokens is None else request.expected_tokens
    return request if expected is None else replace(request, output_tokens=min(request.limit, expected))


def _stated(fields: Mapping[str, Any], number: int) -> list[SimulatedRequest] | None:
    """Return the requests of a line that states its lengths, none for a result without an answer; None: it does not.

    `number`: its own. Raises ValueError for lengths that are none.
    """
    if fields.keys() >= _LENGTHS:
        request = logged({"at": 0, **fields})
        return [] if request is None else [request]
    if not {"custom_id", "response", "error"} <= fields.keys():
        return None
    response = fields["response"]
    body = response.get("body") if isinstance(response, dict) else None
    return _answers(body, number) if isinstance(body, dict) else []


def _answers(body: Mapping[str, Any], number: int) -> list[SimulatedRequest]:
    """Return the requests that gave the answers in the body of a response; none for a copy of another line's answer.

    Several answers are taken to be about equally long, and to one prompt, which a body does not say.
    """
    usage = body.get("usage")
    if isinstance(usage, dict) and usage.get("deduplicated"):
        return []
    prompt, output = token_count(body, "prompt_tokens"), token_count(body, "completion_tokens")
    if not 1 <= min(prompt, output) <= max(prompt, output) <= MOST_TOKENS:
        return []
    choices = body.get("choices")
    answers = min(output, len(choices)) if isinstance(choices, list) and choices else 1
    # They have the prompt in common, and with others nothing that is known.
    blocks = tuple(range(number << 24, (number << 24) + prompt // BLOCK_SIZE)) if answers > 1 else ()
    return [
        SimulatedRequest(
            prompt_tokens=prompt,
            output_tokens=(output + place) // answers,
            traffic="batch",
            blocks=blocks,
            block_tokens=BLOCK_SIZE,
        )
        for place in range(answers)
    ]


def simulated_requests(
    line: Line, encode: Callable[[Any], list[int]], defaults: SamplingParams, longest: int
) -> Iterator[SimulatedRequest]:
    """The requests that a line is, one for each of its answers, as long as it allows.

    What the line says of its answers is in `expected_tokens`: all of the tokens that it allows, if it says that they go
    on after the end of the text. `encode` returns the tokens of a prompt; `longest`: most tokens of a prompt and its
    answer. Raises `InvalidRequest` for a line that cannot be computed.
    """
    body = chat_of_response(line.body) if line.endpoint == RESPONSES_URL else line.body
    generation = read_generation(body, chat=line.endpoint != COMPLETION_URL, defaults=defaults)
    for prompt in generation.prompts:
        ids = encode(prompt)
        blocks = tuple(block_ids(ids, BLOCK_SIZE).tolist())
        params = generation.params(longest - len(ids))
        limit = max(1, params.max_tokens)
        expected = limit if params.ignore_eos else body_expected_tokens(line.body)
        for _ in range(generation.n):
            yield SimulatedRequest(
                prompt_tokens=max(1, len(ids)),
                output_tokens=limit,
                max_tokens=limit,
                traffic="batch",
                blocks=blocks,
                block_tokens=BLOCK_SIZE,
                expected_tokens=None if expected is None else max(1, min(limit, expected)),
            )
