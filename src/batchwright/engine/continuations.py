"""Log-likelihoods of continuations: what is asked of the engine for each, and what its answer says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import InvalidRequest
from batchwright.request import InferenceRequest, InferenceResponse, Score

TextOrTokens: TypeAlias = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens of a context and of its continuation, neither of them empty."""

    context: list[int]
    tokens: list[int]

    def request(self) -> InferenceRequest:
        """Return the request whose answer has the log-probabilities of the continuation."""
        return InferenceRequest(
            [*self.context, *self.tokens],
            max_tokens=0,
            temperature=0.0,
            prompt_logprobs=0,
            prompt_logprobs_start=len(self.context),
            traffic="batch",
        )


def continuation_of(context: TextOrTokens, continuation: TextOrTokens, tokenizer: Tokenizer) -> Continuation:
    """Return the tokens of both. Texts are tokenized together; the continuation has what the context alone has not.

    Blanks at the end of a text are taken to belong to the continuation, as most tokens begin with theirs. An empty text
    as context stands for the token that begins a text. Raises `InvalidRequest`.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise InvalidRequest("a context and its continuation: give two texts, or two lists of token ids", param="context")
    if isinstance(context, str) and isinstance(continuation, str):
        return _of_texts(context, continuation, tokenizer)
    if not context or not continuation:
        raise InvalidRequest("a context and its continuation need at least one token each", param="context")
    return Continuation([*map(int, context)], [*map(int, continuation)])


def score_of(continuation: Continuation, response: InferenceResponse) -> Score:
    """Return what the response to the request of `continuation` says."""
    if response.error is not None:
        return Score(math.nan, False, error=response.error)
    scored = (response.prompt_logprobs or ())[len(continuation.context) :]
    tokens = tuple(each for each in scored if each is not None)
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
        if tokens[0] != tokenizer.first_token_id:
            return Continuation([tokenizer.first_token_id], tokens)
        before, after = tokens[:1], tokens[1:]
    else:
        before, whole = tokenizer.encode(stripped), tokenizer.encode(stripped + continuation)
        after = whole[len(before) :]
    if not after:
        raise InvalidRequest("continuation has no tokens of its own after its context", param="continuation")
    return Continuation(before, after)
