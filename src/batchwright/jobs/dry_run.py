"""What a job would compute: its first requests as they would be sent, and the tokens of all prompts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.errors import BatchwrightError, ContextLengthExceeded, InvalidRequest
from batchwright.jobs.failures import Failures
from batchwright.jobs.job import Job
from batchwright.jobs.lines import BadLine, Line
from batchwright.jobs.planned_time import LineSample
from batchwright.jobs.prompt_survey import PromptPlace, PromptSurvey, SharedPrompts
from batchwright.jobs.provider_cache import CacheableTokens, cacheable_part, sent_text
from batchwright.jobs.token_counts import PromptCounter, TextCounter, TokenCount, bytes_of, token_ids, uncounted
from batchwright.lines.batch_line import line_error
from batchwright.lines.custom_ids import IdTable
from batchwright.lines.forecast import LONGEST_COUNTED, allowed_tokens, default_limit, goes_on_to_its_limit
from batchwright.planning.prefix_order import LEAST_SHARED
from batchwright.request import Prompt, SamplingParams
from batchwright.scheduling.scheduler import kv_refusal
from batchwright.wire.classifying import read_rerank, read_score
from batchwright.wire.dialects import Dialect
from batchwright.wire.fields import completions_of, expected_tokens
from batchwright.wire.requests import EMBEDDINGS_URL, ENCODER_URLS, RERANK_URL, most_tokens_of

if TYPE_CHECKING:
    from batchwright.encoder.texts import TextTokenizer

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that a run would compute."""

    line: int
    custom_id: str
    endpoint: str
    body: Mapping[str, Any]
    prompt_tokens: int
    """Tokens of all its prompts."""
    text: str | None
    """The first prompt as the model gets it, chat template included; None if the model is elsewhere, or an encoder."""
    is_estimate: bool = False
    """Whether some of `prompt_tokens` were not counted, but estimated."""


@dataclass(frozen=True, slots=True)
class AnswersPlanned:
    """What a job would generate, and hold at once."""

    at_most: int | None
    """Tokens of all answers, if each has as many as its line allows; None if some line allows any number."""
    kv_tokens: int | None
    """Tokens of prompts and answers in the KV cache at most, if the longest are computed together and share nothing;
    None if they are computed elsewhere."""
    expected: int | None = None
    """About the tokens of all answers, as lines say or as answers to such lines were; None if nothing is known."""
    kv_is_estimate: bool = False
    """Whether `kv_tokens` is made of estimates of prompts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a job."""

    valid: int
    failures: Failures
    identical: int
    """Valid lines that need not be computed, since their requests are those of earlier ones."""
    prompt_tokens: int
    """Without those of the lines that need not be computed, which are `saved_prompt_tokens`."""
    saved_prompt_tokens: int
    is_estimate: bool
    """Whether some of `prompt_tokens` were not counted, but estimated."""
    first: list[PlannedRequest]
    answers: AnswersPlanned
    shared: SharedPrompts
    cacheable_tokens: int
    """About those of `prompt_tokens` that the cache of a provider keeps; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What the engine that would compute a job holds at once."""

    places: int
    """Sequences that are computed at once."""
    kv_tokens: int | None
    """Tokens in its KV cache; None if that is not known."""
    engines: int = 1
    """Engines that have equal parts of both."""

    @property
    def most_of_a_sequence(self) -> int | None:
        """Most tokens of a prompt and its answer that an engine can hold; None if that is not known."""
        return None if self.kv_tokens is None else self.kv_tokens // self.engines


class LinePlanner:
    """Checks all lines of a job and counts their prompt tokens, which `plan` does once."""

    def __init__(
        self,
        job: Job,
        tokenizer: Any | None,
        check: Callable[[str, Mapping[str, Any]], Sequence[Prompt]],
        add_cost: Callable[[str, Mapping[str, Any], int, CacheableTokens], None] | None = None,
        identify: Callable[[Line], bytes | None] | None = None,
        *,
        defaults: SamplingParams | Mapping[str, Any],
        context: int | None = None,
        capacity: EngineCapacity | None = None,
        endpoint: Dialect | None = None,
        text_tokenizer: Callable[[str], TextTokenizer | None] = lambda endpoint: None,
        sample: LineSample | None = None,
    ) -> None:
        """Tokens are counted with `tokenizer`; without one these are estimates.

        `check` returns the prompts of a body for an endpoint, and raises `InvalidRequest` if it cannot be computed.
        `identify` returns 16 bytes that are equal for lines with the same request; None if each is computed. `add_cost`
        is called with the endpoint, the body and the prompt tokens of each valid line that is computed, and those of
        them that a provider's cache keeps: of those with the same request, the first. `sample` gets the same lines.

        - `defaults`: parameters of lines that do not state their own.
        - `context`: the most tokens of a prompt and its answer; None where that is not known here.
        - `capacity`: that of the engine that computes; None where there is none here.
        - `endpoint`: the dialect of the endpoint elsewhere that computes, whose provider's cache keeps long prefixes
          only; None: there is none.
        - `text_tokenizer` returns the tokenizer of the embedding model that computes lines for an endpoint, and is
          called when the first of them comes; what it raises, `plan` raises. None if it is not known which model
          computes them, so that their tokens are estimates.
        """
        self._job, self._check, self._add_cost, self._identify = job, check, add_cost, identify
        self._context, self._capacity, self._sample = context, capacity, sample
        self._defaults, self._limit = defaults, default_limit(defaults)
        self._counter, self._text_tokenizer = PromptCounter(tokenizer, context, job.total), text_tokenizer
        self._text_counters: dict[str, TextCounter | None] = {}
        self._failures = Failures()
        self._first: list[PlannedRequest] = []
        self._asked = IdTable(job.total)
        """The requests, each with the number of the first line that has it."""
        self._valid = self._identical = self._tokens = self._saved = self._answers = self._expected = 0
        self._is_bounded = self._is_expected = True
        self._is_estimate = self._kv_is_estimate = False
        # What is computed elsewhere finds in a cache what that of a provider keeps.
        self._endpoint, self._survey = endpoint, PromptSurvey(0 if endpoint is None else LEAST_SHARED)
        self._surveyed = 0
        """Tokens of the prompts in the survey."""
        self._cacheable = 0
        """Those of them that a provider's cache keeps."""
        self._largest: list[int] = []
        """Heap of the most tokens that each of the largest lines holds in the KV cache."""

    def plan(self) -> Plan:
        """Go through all lines. Raises what `text_tokenizer` raises."""
        for record in self._job.source.records():
            line = self._job.parser.parse(record)
            custom_id, duplicate = self._job.ids.assign(line.number, line.custom_id)
            error: Exception | None = line.error if isinstance(line, BadLine) else duplicate
            if error is None and not isinstance(line, BadLine):
                counter = self._text_counter(line.endpoint)
                try:
                    self._add(line, custom_id, counter)
                except BatchwrightError as raised:
                    error = raised
            if error is not None:
                self._failures.add(line.number, custom_id, line_error(error))
        known = None if self._capacity is None else self._capacity.kv_tokens
        held = None if self._capacity is None else sum(self._largest)
        return Plan(
            self._valid,
            self._failures,
            self._identical,
            self._tokens,
            self._saved,
            self._is_estimate,
            self._first,
            AnswersPlanned(
                self._answers if self._is_bounded else None,
                held if held is None or known is None else min(held, known),
                self._expected if self._is_expected else None,
                self._kv_is_estimate and held is not None and (known is None or held < known),
            ),
            self._survey.result(self._surveyed, known, self._texts_of),
            self._cacheable,
        )

    def _add(self, line: Line, custom_id: str, text_counter: TextCounter | None) -> None:
        prompts = self._check(line.endpoint, line.body)
        encodes = line.endpoint in ENCODER_URLS
        texts = [bytes_of(each) if encodes else self._text_of(line, each) for each in prompts]
        if text_counter is not None:
            counted = _counts_of_texts(text_counter, line, prompts)
        elif encodes:
            counted = [uncounted(*pair) for pair in zip(prompts, texts, strict=True)]
        else:
            counted = self._counts_of_prompts(line, prompts, texts)
        counts, is_estimate = [tokens for tokens, _ in counted], any(estimate for _, estimate in counted)
        is_shown = len(self._first) < _SHOWN
        shown = self._counter.as_the_model_gets(prompts[0]) if is_shown and prompts and not encodes else None
        self._valid += 1
        identity = None if self._identify is None else self._identify(line)
        if identity is not None and self._asked.claim_digest(identity, line.number) is not None:
            self._identical += 1
            self._saved += sum(counts)
            return
        self._tokens += sum(counts)
        self._is_estimate |= is_estimate
        cacheable = CacheableTokens()
        if not encodes:
            self._kv_is_estimate |= is_estimate
            self._add_answers(line, counts)
            cacheable = self._surveyed_of(line, prompts, texts, counts)
        if self._sample is not None:
            self._sample.add(line, sum(map(len, texts)))
        if self._add_cost is not None:
            self._add_cost(line.endpoint, line.body, sum(counts), cacheable)
        if is_shown:
            self._first.append(
                PlannedRequest(line.number, custom_id, line.endpoint, line.body, sum(counts), shown, is_estimate)
            )

    def _counts_of_prompts(self, line: Line, prompts: Sequence[Prompt], texts: Sequence[bytes]) -> list[TokenCount]:
        """The tokens of the prompts of a line that is answered. Raises `ContextLengthExceeded` as the engine will."""
        limit = allowed_tokens(line.body, self._limit or 1)
        counted = [self._counter.count(*pair, limit) for pair in zip(prompts, texts, strict=True)]
        longest = max((tokens for tokens, _ in counted), default=0)
        _check_length(
            line, longest, limit, self._context, None if self._capacity is None else self._capacity.most_of_a_sequence
        )
        return counted

    def _text_counter(self, endpoint: str) -> TextCounter | None:
        if endpoint not in self._text_counters:
            tokenizer = self._text_tokenizer(endpoint)
            self._text_counters[endpoint] = None if tokenizer is None else TextCounter(tokenizer, self._job.total)
        return self._text_counters[endpoint]

    def _text_of(self, line: Line, prompt: Prompt) -> bytes:
        return self._counter.text_of(prompt) if self._endpoint is None else sent_text(line.body, prompt)

    def _surveyed_of(
        self, line: Line, prompts: Sequence[Prompt], texts: Sequence[bytes], counts: Sequence[int]
    ) -> CacheableTokens:
        """Add what a cache keeps of the prompts of a line to the survey; return its tokens in a provider's cache."""
        cacheable = CacheableTokens()
        for prompt, text, count in zip(prompts, texts, counts, strict=True):
            if self._endpoint is not None:
                text, count, kept = cacheable_part(self._endpoint, line.endpoint, line.body, prompt, text, count)
                cacheable += kept
            self._survey.add(line.number, text)
            self._surveyed += count
        self._cacheable += cacheable.all
        return cacheable

    def _texts_of(self, places: Collection[PromptPlace]) -> dict[PromptPlace, bytes | Sequence[int]]:
        """The prompts in these places, read again."""
        wanted: dict[int, list[int]] = {}
        for number, place in places:
            wanted.setdefault(number, []).append(place)
        texts: dict[PromptPlace, bytes | Sequence[int]] = {}
        for record in self._job.source.records():
            if len(texts) == len(places):
                break
            if record.number in wanted and isinstance(line := self._job.parser.parse(record), Line):
                prompts = self._check(line.endpoint, line.body)
                for place in wanted[record.number]:
                    ids = token_ids(prompts[place])
                    texts[record.number, place] = self._text_of(line, prompts[place]) if ids is None else ids
        return texts

    def _add_answers(self, line: Line, counts: Sequence[int]) -> None:
        limit = allowed_tokens(line.body, self._limit or LONGEST_COUNTED)
        completions = _completions(line.body, self._defaults)
        self._is_bounded &= self._limit is not None or allowed_tokens(line.body, 0) > 0
        self._answers += limit * completions * len(counts)
        expected = limit if goes_on_to_its_limit(line.body, self._defaults) else expected_tokens(line.body)
        self._is_expected &= expected is not None
        self._expected += min(limit, expected or 0) * completions * len(counts)
        if self._capacity is None:
            return
        for count in counts:
            # Those beyond the places are not held together.
            for _ in range(min(completions, self._capacity.places)):
                push = heapq.heappush if len(self._largest) < self._capacity.places else heapq.heappushpop
                push(self._largest, count + limit)


def _counts_of_texts(counter: TextCounter, line: Line, inputs: Sequence[Prompt]) -> list[TokenCount]:
    """Return the tokens of the texts of a line for an embedding model. Raises as that will."""
    most = most_tokens_of(line.body)
    if line.endpoint == EMBEDDINGS_URL:
        return counter.count("input", inputs, most)
    # Each text of a pair is embedded by itself.
    pairs = read_rerank(line.body) if line.endpoint == RERANK_URL else read_score(line.body)
    return counter.count(pairs.first_param, pairs.first, most) + counter.count(pairs.param, pairs.second, most)


def _completions(body: Mapping[str, Any], defaults: SamplingParams | Mapping[str, Any]) -> int:
    """Return the completions of each prompt of a body; 1 where an endpoint elsewhere may know better."""
    if isinstance(defaults, SamplingParams):
        asked: Mapping[str, Any] = body if body.get("n") is not None else {**body, "n": defaults.n}
    else:
        asked = {**defaults, **body}  # a null is sent as it is
    try:
        return completions_of(asked)
    except InvalidRequest:
        return 1


def _check_length(line: Line, prompt_tokens: int, limit: int, context: int | None, capacity: int | None) -> None:
    """Raise `ContextLengthExceeded`, as the engine will, if a prompt and its answer are longer than the engine allows.

    `context` and `capacity`: the most tokens of both, by the model and by the KV cache; None: any number.
    """
    computed = prompt_tokens
    if line.body.get("max_tokens") == 0:
        computed, limit = prompt_tokens - 1, 0  # the last token of what is only scored is not computed
    if context is not None and computed + limit > context:
        raise ContextLengthExceeded(
            f"{prompt_tokens} prompt tokens and max_tokens={limit} exceed the context of {context} tokens: shorten the "
            "prompt or lower max_tokens"
        )
    if capacity is not None and (reason := kv_refusal(computed, limit, capacity)) is not None:
        raise ContextLengthExceeded(reason)
