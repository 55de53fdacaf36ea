"""Log-likelihoods of continuations: the requests to the engine for them, and the scores from its answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from batchwright.engine.scoring import PromptScores
from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import BatchwrightError, InvalidRequest
from batchwright.request import InferenceRequest, Score, TokenLogprob

TextOrTokens: TypeAlias = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens of a context and of its continuation, neither of them empty."""

    context: list[int]
    tokens: list[int]


class SharedScoring:
    """One request for all continuations of a context that differ only in their last token."""

    def __init__(self, first: Continuation) -> None:
        self.first = first
        self.places: list[tuple[int, int]] = []
        """For each continuation, its place among the scores and the number of its ending."""
        self._endings: dict[int, int] = {}

    def add(self, place: int, continuation: Continuation) -> None:
        """Add the continuation at `place`, whose tokens are the same except for the last one."""
        number = self._endings.setdefault(continuation.tokens[-1], len(self._endings))
        self.places.append((place, number))

    def request(self) -> InferenceRequest:
        """Return the request to the engine, which is for the first continuation."""
        return InferenceRequest(
            [*self.first.context, *self.first.tokens], max_tokens=0, temperature=0.0, prompt_logprobs=0, traffic="batch"
        )

    def scores(self, tokenizer: Tokenizer) -> PromptScores:
        """Return the object that receives the engine's scores."""
        _, *others = self._endings
        return PromptScores(
            [*self.first.context, *self.first.tokens], 0, len(self.first.context), tokenizer, endings=others
        )


class Scoring:
    """The scores of continuations: the requests for them, and the scores from the answers.

    The arguments are those of `Engine.score`. Raises ValueError if the numbers of contexts and continuations do not
    match.
    """

    def __init__(
        self,
        contexts: TextOrTokens | Sequence[TextOrTokens],
        continuations: Sequence[TextOrTokens],
        tokenizer: Tokenizer,
    ) -> None:
        given = cast("Sequence[TextOrTokens]", contexts)
        if isinstance(contexts, str) or (given and isinstance(given[0], int)):
            given = [cast("TextOrTokens", contexts)] * len(continuations)
        if len(given) != len(continuations):
            raise ValueError(
                f"contexts: {len(given)} for {len(continuations)} continuations; give one, or one for each"
            )
        self._found: dict[int, Score] = {}
        wanted: dict[int, Continuation] = {}
        for place, pair in enumerate(zip(given, continuations, strict=True)):
            try:
                wanted[place] = continuation_of(*pair, tokenizer)
            except InvalidRequest as refusal:
                self._found[place] = Score(math.nan, False, error=refusal)
        self.wanted = len(wanted)
        """Number of scores to compute."""
        asked = [(each.request(), each) for each in shared(wanted)]
        self.requests = [request for request, _ in asked]
        """Requests to the engine."""
        self.prompt_scores = {request.request_id: each.scores(tokenizer) for request, each in asked}
        """Objects that receive the engine's scores, by the ids of the requests."""
        self._asked = {request.request_id: each for request, each in asked}

    def answered(self, request_id: str, error: BatchwrightError | None) -> int:
        """Record that a request was answered, or failed with `error`; return the number of scores that it gave."""
        own, places = self.prompt_scores.pop(request_id), self._asked[request_id].places
        for place, ending in places:
            self._found[place] = Score(math.nan, False, error=error) if error else score_of(own.ended(ending))
        return len(places)

    def scores(self) -> list[Score]:
        """Return the scores in the order of the continuations, once all requests are answered."""
        return [self._found[place] for place in range(len(self._found))]


def shared(continuations: Mapping[int, Continuation]) -> list[SharedScoring]:
    """Return the requests for continuations, given by their places; prompts that begin alike follow each other."""
    found: dict[tuple[int, tuple[int, ...]], SharedScoring] = {}
    for place, each in continuations.items():
        key = len(each.context), (*each.context, *each.tokens[:-1])
        found.setdefault(key, SharedScoring(each)).add(place, each)
    return [found[key] for key in sorted(found, key=lambda key: key[1])]


def continuation_of(context: TextOrTokens, continuation: TextOrTokens, tokenizer: Tokenizer) -> Continuation:
    """Return the tokens of both. Texts are tokenized together: tokens beyond the context's own are the continuation's.

    Blanks at the end of a context are counted with the continuation, since most tokens begin with their blank. An empty
    context stands for the token that begins a text. Raises `InvalidRequest`.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise InvalidRequest(
            "a context and its continuation: give two texts, or two lists of token ids", param="context"
        )
    if isinstance(context, str) and isinstance(continuation, str):
        return _of_texts(context, continuation, tokenizer)
    if not context or not continuation:
        raise InvalidRequest("a context and its continuation need at least one token each", param="context")
    return Continuation(tokenizer.encode(context), tokenizer.encode(continuation))


def score_of(tokens: tuple[TokenLogprob, ...]) -> Score:
    """Return the score of a continuation with these tokens."""
    return Score(math.fsum(each.logprob for each in tokens), all(each.rank == 1 for each in tokens), tokens)


def _of_texts(context: str, continuation: str, tokenizer: Tokenizer) -> Continuation:
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if not continuation:
        raise InvalidRequest("continuation is empty: give at least one character", param="continuation")
    if not stripped:
        if tokenizer.first_token_id is None:
            raise InvalidRequest("context is empty, and the model has no token that begins a text", param="context")
        tokens = tokenizer.encode_bare(continuation)
        begins = tokens[:1] == [tokenizer.first_token_id]
        before, after = [tokenizer.first_token_id], tokens[1:] if begins else tokens
    else:
        before, whole = tokenizer.encode(stripped), tokenizer.encode(stripped + continuation)
        after = whole[len(before) :]
    if not after:
        raise InvalidRequest("continuation has no tokens of its own after its context", param="continuation")
    return Continuation(before, after)
