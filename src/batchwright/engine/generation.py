"""The state of a request while it is computed: one `Generation` for each of its `n` completions."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchwright.engine.grammars import Matcher
from batchwright.engine.sampling import RowLogprobs, Sampled, SamplingState
from batchwright.engine.scoring import PromptScores
from batchwright.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from batchwright.errors import BatchwrightError
from batchwright.request import Choice, FinishReason, InferenceRequest, InferenceResponse, TokenLogprob, Usage
from batchwright.scheduling import Sequence
from batchwright.stop_strings import StopStrings


class Generation:
    """State of one completion: its sequence, its text so far and why it ended."""

    def __init__(
        self,
        owner: RequestState,
        index: int,
        sequence: Sequence,
        tokenizer: Tokenizer,
        *,
        incremental: bool,
        matcher: Matcher | None = None,
    ) -> None:
        params = owner.request
        self.owner = owner
        self.index = index
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.first_token_at: float | None = None
        self.chain = 0
        """Steps that chose tokens for this completion."""
        self.turns = 0
        """Steps among them that computed only the tokens that were chosen last."""
        self.forced_tokens = 0
        """Tokens that a grammar left no choice about."""
        self.known = sequence.num_prompt
        """Tokens that were known when the last one was chosen, all of which had to be computed."""
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_token_ids)
        self.matcher = matcher
        self.sampling = SamplingState(params, index, sequence.tokens, self.ends, matcher)
        self._has_end_token = False
        self._tokenizer = tokenizer
        self._stops = StopStrings(params.stop)
        # Before the end, text is needed only for streaming and for stop strings.
        self._detokenizer = IncrementalDetokenizer(tokenizer.decode) if incremental or params.stop else None
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.tokens[self.sequence.num_prompt :]

    @property
    def needs_host(self) -> bool:
        """Whether its next token cannot be chosen, or held back, until the host has seen the last one."""
        return (
            self.matcher is not None
            or self._detokenizer is not None
            or self.owner.streams
            or not self.sampling.untouched
        )

    @property
    def last_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of the last accepted token; None if the request does not ask for any."""
        return None if self._logprobs is None else tuple(self._logprobs[-1:])

    def accept(self, outcome: Sampled) -> str:
        """Take the next token (not None), set `finish_reason` if it is the last, and return the new certain text."""
        token = outcome.token
        if token is None:
            raise ValueError("a row without finite logits has no token to accept")
        params = self.owner.request
        self.sequence.tokens.append(token)
        self.sampling.record(token)
        if self._logprobs is not None and outcome.logprobs is not None:
            self._logprobs.append(self._named(token, outcome.logprobs))
        if self.matcher is not None:
            self.matcher.advance(token)
        generated = self.sampling.generated
        armed = generated >= params.min_tokens
        text = ""
        if (armed and token in self.ends) or (self.matcher is not None and token in self.matcher.ends):
            self.finish_reason = "stop"
            self._has_end_token = True
        elif self._detokenizer is not None:
            text, stopped = self._stops.push(self._detokenizer.push([token]), armed=armed)
            if stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and self.matcher is not None and self.matcher.is_complete:
            self.finish_reason = "stop"  # a token that only says so would take another step
        if self.finish_reason is None and generated >= params.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._stops.flush()
        if text:
            self._text.append(text)
        return text

    def choice(self, *, text: bool = True) -> Choice:
        """Return the completion so far; without `text`, only its tokens."""
        return Choice(
            index=self.index,
            text=self._complete_text() if text else "",
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or "error",
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            form=self._form,
        )

    def forced(self) -> list[int]:
        """Return the next tokens that the grammar leaves no choice about, so that they need not be chosen.

        There are none if log-probabilities are wanted: each token is then chosen among all.
        """
        if self.matcher is None or self.finish_reason is not None or self._logprobs is not None:
            return []
        return self.matcher.forced()

    @property
    def _form(self) -> object:
        request = self.owner.request
        return request.schema if request.schema is not None else True if request.json_object else None

    def _complete_text(self) -> str:
        if self._detokenizer is not None:
            return "".join(self._text)
        tokens = self.token_ids
        if self._has_end_token:
            tokens = tokens[:-1]
        text = self._tokenizer.decode(tokens)
        if text.endswith("\ufffd"):  # perhaps a partial character: end as a stream of the same tokens would
            detokenizer = IncrementalDetokenizer(self._tokenizer.decode)
            return "".join(detokenizer.push([token]) for token in tokens)
        return text

    def _named(self, token: int, logprobs: RowLogprobs) -> TokenLogprob:
        name = self._tokenizer.token_text
        top = tuple((other, name(other), value) for other, value in zip(logprobs.top_ids, logprobs.top, strict=True))
        return TokenLogprob(token, name(token), logprobs.chosen, top)


@dataclass(slots=True, eq=False)
class RequestState:
    """State of a request in the engine. Times are seconds of the engine's clock."""

    request: InferenceRequest
    prompt_tokens: int
    submitted_at: float
    streams: bool
    generations: list[Generation] = field(default_factory=list)
    first_step_at: float | None = None
    first_token_at: float | None = None
    error: BatchwrightError | None = None
    scores: PromptScores | None = None
    """Log-probabilities of the prompt, if they are wanted."""

    @property
    def done(self) -> bool:
        return all(generation.finish_reason is not None for generation in self.generations)

    def response(self, now: float, *, text: bool = True) -> InferenceResponse:
        """Return the response, complete or with the output so far."""
        choices = tuple(generation.choice(text=text) for generation in self.generations)
        generated = sum(len(choice.token_ids) for choice in choices)
        started = now if self.first_step_at is None else self.first_step_at
        first = None if self.first_token_at is None else (self.first_token_at - self.submitted_at) * 1e3
        return InferenceResponse(
            request_id=self.request.request_id,
            output=choices[0].text,
            tokens_generated=generated,
            latency_ms=(now - self.submitted_at) * 1e3,
            queue_ms=(started - self.submitted_at) * 1e3,
            finish_reason=choices[0].finish_reason,
            usage=Usage(self.prompt_tokens, generated, self.generations[0].sequence.num_cached),
            token_ids=choices[0].token_ids,
            error=self.error,
            ttft_ms=first,
            choices=choices,
            metadata=self.request.metadata,
            prompt_logprobs=None if self.scores is None or self.error is not None else self.scores.named(),
        )
