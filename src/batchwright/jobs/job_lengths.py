"""Lengths of a job's lines, for simulations: of prompts as the tokenizer counts them, of answers as expected."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import msgspec

from batchwright.errors import BatchwrightError, ContextLengthExceeded, InputError, InvalidRequest
from batchwright.jobs.earlier_answers import JobSignature, LengthSource, LikelyLengths, RunAnswers, likely_lengths
from batchwright.jobs.input_names import STREAM, expanded
from batchwright.jobs.lines import BadLine, Line, LineParser
from batchwright.jobs.sources import InputFormat, Record, fingerprint_of, version_of
from batchwright.jobs.spec import TABLES, JobSpec
from batchwright.jobs.table_sources import open_source
from batchwright.jobs.templates import Templates
from batchwright.lines.batch_line import decode_line, token_count
from batchwright.planning.prefix_tree import block_ids
from batchwright.request import SamplingParams
from batchwright.scheduling.sizes import BLOCK_SIZE
from batchwright.simulation.outcome import LeftOut, WhyLeftOut
from batchwright.simulation.replica import Refusal
from batchwright.simulation.requests import SimulatedRequest
from batchwright.simulation.traces import MOST_TOKENS, logged
from batchwright.wire.fields import expected_tokens as body_expected_tokens
from batchwright.wire.identity import identity_of
from batchwright.wire.requests import COMPLETION_URL, ENCODER_URLS, RESPONSES_URL, read_generation
from batchwright.wire.text_responses import chat_of_response

_MAX_LINE_BYTES = 2**30
_LENGTHS = frozenset({"prompt_tokens", "output_tokens"})
"""Fields of a line that states its lengths."""
_PROMPT_DETAILS = "prompt_tokens_details"
LengthsFrom: TypeAlias = Literal["lines", "expected_tokens", "limits"] | LengthSource
"""Where the lengths of answers are known from: all from lines or results; for those of which these do not say it, from
the caller, from earlier runs, or as long as lines allow."""
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class JobLengths:
    """The lines of a job as requests to simulate, and what is said about the others."""

    requests: list[SimulatedRequest]
    left_out: tuple[LeftOut, ...]
    """Lines that are not computed, by reason."""
    results: int
    """Lines that are results of an earlier run, of which there is no text."""
    cached_tokens: int
    """Prompt tokens that this run found in its cache."""
    lengths_from: LengthsFrom
    runs: int
    """Number of earlier runs whose answers were used."""


class _InvalidLengths(ValueError):
    """A line states lengths that are not valid."""


class _LeftOut(Exception):
    """A line is not computed."""

    def __init__(self, reason: WhyLeftOut, message: str | None = None) -> None:
        super().__init__(reason, message)
        self.reason: WhyLeftOut = reason
        self.message = message


class _Ledger:
    """Counts the lines that are left out, and keeps the first of each reason."""

    def __init__(self) -> None:
        self._found: dict[WhyLeftOut, LeftOut] = {}

    def add(self, line: int, why: _LeftOut) -> None:
        first = self._found.get(why.reason)
        self._found[why.reason] = (
            LeftOut(reason=why.reason, lines=1, first_line=line, message=why.message)
            if first is None
            else msgspec.structs.replace(first, lines=first.lines + 1)
        )

    @property
    def found(self) -> tuple[LeftOut, ...]:
        return tuple(self._found.values())


def job_lengths(
    name: str,
    tokenizer: Callable[[], Any],
    *,
    defaults: SamplingParams,
    longest: int,
    refusal: Callable[[SimulatedRequest], Refusal | None] = lambda request: None,
    expected_tokens: int | None = None,
    runs: Callable[[], Sequence[RunAnswers]] = tuple,
    seed: int = 0,
    input_format: str | None = None,
    progress: Callable[[int], None] = lambda lines: None,
) -> JobLengths:
    """Return the lines of a job as requests to simulate, from files in any form that `run` reads, except a stream.

    The lengths of answers are those of result lines of an earlier run, where the file has these, or of lines such as
    `{"prompt_tokens": 300, "output_tokens": 120}`; else the number that a line itself expects, else `expected_tokens`;
    without it, they are drawn with `seed` as a plan draws them, from those of earlier `runs` of the model, or if these
    say nothing, the most that a line allows. `longest`: most tokens of a prompt and its answer. `refusal` returns why
    an engine would never compute a request; None: it would. `tokenizer` is called when prompts must be counted.
    `input_format`: see `run`; None: that of the extension. `progress` is called with the number of lines so far. The
    prompt of a table's row is in its column `prompt`. Of lines with identical requests, only the first is computed, as
    in `run`. Lines that cannot be computed are left out. Raises `InputError` if there are no others, and what reading
    the file and loading the tokenizer raise.
    """
    spec = JobSpec(inputs=expanded([name]), output=STREAM, model=None, defaults=defaults, input_format=input_format)
    if spec.from_stream:
        raise InputError(f"{name} is a stream, of which no job to simulate is read: save it to a file first")
    resolved = spec.resolved_format()
    is_table = resolved in TABLES
    templates = Templates.of("{prompt}", None, None) if is_table else None
    lines = _Lines(
        parser=LineParser(resolved, templates, max_line_bytes=_MAX_LINE_BYTES),
        tokenizer=tokenizer,
        defaults=defaults,
        longest=longest,
    )
    ledger = _Ledger()
    found: list[SimulatedRequest] = []
    are_open: list[int] = []
    results = cached_tokens = 0
    records = open_source(spec.paths, resolved, max_line_bytes=_MAX_LINE_BYTES).records()
    for count, record in enumerate(records):
        progress(count)
        fields = _fields_of(record, resolved)
        try:
            requests = None if fields is None else _stated(fields, record.number)
            is_stated = requests is not None
            if requests is None:
                requests = lines.requests(record)
            if reason := next(filter(None, map(refusal, requests)), None):
                raise _LeftOut("too_long", reason.message)
        except _LeftOut as left_out:
            ledger.add(record.number, left_out)
            continue
        except _InvalidLengths as error:
            raise InputError(f"{name}, line {record.number}: {error}") from None
        if fields is not None and _is_result(fields):
            results += 1
            cached_tokens += token_count(fields["response"]["body"], "cached_tokens", _PROMPT_DETAILS)
        if not is_stated:
            are_open += [place for place, each in enumerate(requests, len(found)) if each.expected_tokens is None]
        found += requests if is_stated else with_lengths(requests, None)
    if not found:
        needed = ": its rows need a column 'prompt', or 'prompt_tokens' and 'output_tokens'" if is_table else ""
        why = "".join(f"; {each.described}" for each in ledger.found)
        raise InputError(f"{name} has no line that can be computed{needed}{why}")
    unknown = [found[place] for place in are_open]
    likely = _earlier(runs, spec, unknown) if unknown and expected_tokens is None else None
    for place, request in zip(are_open, _expected(unknown, expected_tokens, likely, seed), strict=True):
        found[place] = request
    lengths_from = _source(likely, expected_tokens) if unknown else "lines"
    return JobLengths(found, ledger.found, results, cached_tokens, lengths_from, 0 if likely is None else likely.runs)


@dataclass(slots=True, kw_only=True)
class _Lines:
    """Makes requests of the lines that have a prompt."""

    parser: LineParser
    tokenizer: Callable[[], Any]
    defaults: SamplingParams
    longest: int
    encode: Callable[[Any], list[int]] | None = None
    asked: set[bytes] = field(default_factory=set)
    """Requests of earlier lines that always have the same answer."""

    def requests(self, record: Record) -> list[SimulatedRequest]:
        """Return the requests of a record. Raises `_LeftOut`, and what loading the tokenizer raises."""
        line = self.parser.parse(record)
        if isinstance(line, BadLine):
            raise _LeftOut("broken", str(line.error))
        if line.endpoint in ENCODER_URLS:
            raise _LeftOut("encoder")
        if self.encode is None:
            self.encode = self.tokenizer().encode
        try:
            requests = [*simulated_requests(line, self.encode, self.defaults, self.longest)]
        except ContextLengthExceeded as error:
            raise _LeftOut("too_long", str(error)) from None
        except BatchwrightError as error:
            raise _LeftOut("broken", str(error)) from None
        if (identity := identity_of(line.endpoint, line.body, self.defaults, here=True)) is not None:
            if identity in self.asked:
                raise _LeftOut("identical")
            self.asked.add(identity)
        return requests


def _expected(
    requests: Sequence[SimulatedRequest], tokens: int | None, likely: LikelyLengths | None, seed: int
) -> list[SimulatedRequest]:
    """Return requests of which lines do not say how long the answers are, with answers of `tokens`, or likely ones."""
    if tokens is None:
        return with_lengths(requests, likely, seed=seed)
    return [replace(each, output_tokens=min(each.limit, tokens)) for each in requests]


def _source(likely: LikelyLengths | None, tokens: int | None) -> LengthsFrom:
    if tokens is not None:
        return "expected_tokens"
    return "limits" if likely is None else likely.source


def with_lengths(
    requests: Sequence[SimulatedRequest], likely: LikelyLengths | None, factor: float = 1.0, seed: int = 0
) -> list[SimulatedRequest]:
    """Return the requests with answers of likely lengths, each `factor` times as long, unless lines say their lengths.

    `likely`: None: each is as long as its line allows. `seed`: of which has which length.
    """
    # Evenly spaced shares, shuffled: every sample has its part of long answers.
    shares = [(place + 0.5) / len(requests) for place in range(len(requests))]
    random.Random(seed).shuffle(shares)
    found = []
    for each, share in zip(requests, shares, strict=True):
        tokens = each.expected_tokens
        if tokens is None:
            tokens = round(factor * each.limit) if likely is None else likely.drawn(each.limit, share, factor)
        found.append(replace(each, output_tokens=max(1, min(each.limit, tokens)), max_tokens=each.limit))
    return found


def _earlier(
    runs: Callable[[], Sequence[RunAnswers]], spec: JobSpec, requests: Sequence[SimulatedRequest]
) -> LikelyLengths | None:
    """Return what `runs` say about the answers to `requests` of a job."""
    if not (kept := runs()):
        return None
    contents = [fingerprint_of(path, version_of(path)) for path in spec.paths]
    return likely_lengths(kept, JobSignature.of(spec, contents), Counter(each.limit for each in requests))


def _fields_of(record: Record, input_format: InputFormat) -> Mapping[str, Any] | None:
    """Return the fields of a row or of a JSON object; None for anything else. Whole numbers in a CSV are numbers."""
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


def _is_result(fields: Mapping[str, Any]) -> bool:
    return {"custom_id", "response", "error"} <= fields.keys() and not fields.keys() >= _LENGTHS


def _stated(fields: Mapping[str, Any], number: int) -> list[SimulatedRequest] | None:
    """Return the requests of a line that states its lengths; None if it does not.

    `number`: its own. Raises `_LeftOut` for a result without an answer, and `_InvalidLengths`.
    """
    if fields.keys() >= _LENGTHS:
        try:
            request = logged({"at": 0, **fields})
        except ValueError as error:
            raise _InvalidLengths(str(error)) from None
        if request is None:
            raise _LeftOut("no_answer")
        return [request]
    if not _is_result(fields):
        return None
    response = fields["response"]
    body = response.get("body") if isinstance(response, dict) else None
    if not isinstance(body, dict):
        raise _LeftOut("no_answer")
    return _answers(body, number)


def _answers(body: Mapping[str, Any], number: int) -> list[SimulatedRequest]:
    """Return the requests that gave the answers in the body of a response. Raises `_LeftOut` if there are none.

    Several answers are assumed to be about equally long and to one prompt, since a body does not say. Only the length
    of what was found in the cache is known: it counts as the same prefix for all.
    """
    usage = body.get("usage")
    if isinstance(usage, dict) and usage.get("deduplicated"):
        raise _LeftOut("identical")
    prompt, output = token_count(body, "prompt_tokens"), token_count(body, "completion_tokens")
    if not 1 <= min(prompt, output) <= max(prompt, output) <= MOST_TOKENS:
        raise _LeftOut("no_answer")
    choices = body.get("choices")
    answers = min(output, len(choices)) if isinstance(choices, list) and choices else 1
    shared = min(token_count(body, "cached_tokens", _PROMPT_DETAILS), prompt) // BLOCK_SIZE
    # They have all of the prompt in common; its own blocks have other ids than those that lines share.
    own = range((number + 1) << 24, ((number + 1) << 24) + prompt // BLOCK_SIZE - shared) if answers > 1 else ()
    blocks = (*range(shared), *own)
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
    """The requests of a line, one for each of its answers, each as long as it allows.

    `expected_tokens` is what the line says about its answers: all of the tokens that it allows, if it says that they go
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
