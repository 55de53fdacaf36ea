"""Bodies of OpenAI responses, and the chunks of their streams."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from batchwright.request import Choice, FinishReason, InferenceResponse, TokenLogprob, Usage
from batchwright.wire.requests import EncodingFormat
from batchwright.wire.tool_calls.parser import AnswerForm, AnswerParser
from batchwright.wire.tool_calls.pieces import Arguments, CallBegin, Content, Piece, Thought

Body = dict[str, Any]
Embedding: TypeAlias = str | list[float]
"""A vector in an answer: base64, or a list of numbers."""

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have, as in OpenAI's API."""
_POWERS = np.array([float(f"1e{power}") for power in range(64)])
_FIRST_DIGITS, _LAST_DIGITS = 6, 10
"""Numbers of digits to try for a float32: all decimals of 6 digits survive the conversion to float32 and back, and 9
digits restore every float32. One more, since the place of the first digit is taken from a logarithm, which may be off
by one near a power of ten."""


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that a response and all its chunks have in common."""

    key: str
    """Unique key of the response, from which its `id` is made."""
    created: int
    """Time of creation in Unix seconds."""
    model: str
    chat: bool
    """Whether it is a chat completion (else a text completion)."""
    n: int = 1
    """Number of completions of each prompt: choice `i` of prompt `p` has the index `p·n + i`."""
    system_fingerprint: str | None = None
    """Fingerprint of what computes: while it stays the same, so do the answers to requests with the same seed."""
    form: AnswerForm | None = None
    """What answers to a chat may consist of. None: of content only."""

    def call_id(self, index: int, call: int) -> str:
        """Return the id of a call of choice `index`, which no other response has."""
        digest = blake2b(f"{self.key}/{index}/{call}".encode(), digest_size=12).hexdigest()
        short = self.form is not None and self.form.tool_format is not None and self.form.tool_format.short_ids
        return digest[:9] if short else f"call_{digest}"

    def body(self, choices: list[Body], *, chunk: bool = False) -> Body:
        """Return a body with these choices."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.key}",
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self.created,
            "model": self.model,
            **({} if self.system_fingerprint is None else {"system_fingerprint": self.system_fingerprint}),
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt with which each choice of a text completion begins."""

    text: str
    first_token: str
    """Text of its first token, which has no log-probability."""
    logprobs: int | None
    """Number of alternatives to each of its tokens. None: no log-probabilities are given."""


def completion_body(
    head: Head,
    responses: Sequence[InferenceResponse],
    *,
    echoes: Sequence[Echo] | None = None,
    prompt_logprobs: int | None = None,
) -> Body:
    """Return the whole answer, given the response to each prompt, in order, and the prompts to echo.

    With `prompt_logprobs`, it has those of the prompt in vLLM's form, with that many alternatives.
    """
    choices: list[Body] = []
    of_prompt: Body = {}
    for position, response in enumerate(responses):
        if prompt_logprobs is not None:
            of_prompt = {"prompt_logprobs": _prompt_logprobs(response.prompt_logprobs or (), prompt_logprobs)}
        for choice in response.choices:
            index, reason = position * head.n + choice.index, choice.finish_reason
            if head.chat:
                message, ended = _message(head, index, choice.text, reason)
                logprobs = _chat_logprobs(choice.logprobs)
                choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": ended})
            elif echoes is not None:
                choices.append(_echoing_choice(index, echoes[position], response, choice) | of_prompt)
            else:
                choices.append(_text_choice(index, choice.text, choice.logprobs, reason) | of_prompt)
    body = head.body(choices) | {"usage": _usage([response.usage for response in responses])}
    return body | of_prompt if head.chat else body


def _message(head: Head, index: int, text: str, reason: str) -> tuple[Body, str]:
    """Return the message of a choice, and why it ended."""
    if head.form is None:
        return {"role": "assistant", "content": text, "refusal": None}, reason
    answer = head.form.parse(text)
    message: Body = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    if not answer.calls:
        return message, reason
    message["content"] = answer.content or None
    message["tool_calls"] = [
        {
            "id": head.call_id(index, position),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for position, call in enumerate(answer.calls)
    ]
    return message, "tool_calls" if reason == "stop" else reason


class Chunks:
    """Makes the chunks of one stream, whose choices may be interleaved in any order."""

    def __init__(self, head: Head, *, include_usage: bool) -> None:
        """With `include_usage`, a last chunk without choices has the token counts, and all others have null instead."""
        self._head = head
        self._include_usage = include_usage
        self._offsets: dict[int, int] = {}
        """Number of characters of the tokens so far, by the index of each choice that has begun."""
        self._parsers: dict[int, AnswerParser] = {}
        self._calling: set[int] = set()
        """Indices of the choices that have a call."""

    def text(
        self,
        index: int,
        text: str,
        *,
        logprobs: Sequence[TokenLogprob] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> list[Body]:
        """Return the chunks for new text of choice `index`, which may be empty. In a chat the role comes first."""
        if not self._head.chat:
            if not (text or logprobs or finish_reason):
                return []
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + sum(len(entry.token) for entry in logprobs or ())
            return [self._chunk([_text_choice(index, text, logprobs, finish_reason, offset)])]
        deltas: list[tuple[Body, Body | None, str | None]] = []
        if index not in self._offsets:
            self._offsets[index] = 0
            deltas.append(({"role": "assistant", "content": "", "refusal": None}, None, None))
        texts = self._text_deltas(index, text, is_last=finish_reason is not None)
        if logprobs and not texts:
            texts = [{"content": ""}]
        # The log-probabilities of the tokens come with the first piece of their text.
        deltas += [(each, None if at else _chat_logprobs(logprobs), None) for at, each in enumerate(texts)]
        if finish_reason is not None:
            calls = finish_reason == "stop" and index in self._calling
            deltas.append(({}, None, "tool_calls" if calls else finish_reason))
        return [
            self._chunk([{"index": index, "delta": delta, "logprobs": named, "finish_reason": reason}])
            for delta, named, reason in deltas
        ]

    def _text_deltas(self, index: int, text: str, *, is_last: bool) -> list[Body]:
        """Return the deltas for new text of a chat."""
        form = self._head.form
        if form is None:
            return [{"content": text}] if text else []
        parser = self._parsers.get(index) or self._parsers.setdefault(index, form.parser())
        pieces = parser.push(text) + (parser.finish() if is_last else [])
        return [self._delta(index, piece) for piece in pieces]

    def _delta(self, index: int, piece: Piece) -> Body:
        match piece:
            case Content():
                return {"content": piece.text}
            case Thought():
                return {"reasoning_content": piece.text}
            case CallBegin():
                self._calling.add(index)
                call = {"id": self._head.call_id(index, piece.call), "type": "function"}
                return {"tool_calls": [
                    {"index": piece.call, **call, "function": {"name": piece.name, "arguments": ""}}
                ]}  # fmt: skip
            case Arguments():
                return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}

    def usage(self, usages: Sequence[Usage]) -> list[Body]:
        """Return the chunk that ends the stream, if there is one, given the token counts of each prompt."""
        return [self._head.body([], chunk=True) | {"usage": _usage(usages)}] if self._include_usage else []

    def _chunk(self, choices: list[Body]) -> Body:
        body = self._head.body(choices, chunk=True)
        return body | {"usage": None} if self._include_usage else body


def embeddings_body(model: str, embeddings: Sequence[Embedding], prompt_tokens: int) -> Body:
    """Return the answer with the embedding of each input, in order."""
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(embeddings)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def encode_vectors(vectors: Sequence[npt.NDArray[np.float32]], encoding_format: EncodingFormat) -> Sequence[Embedding]:
    """Encode vectors [dim], of which there must be at least one, for an answer.

    Base64 encodes little-endian float32. Numbers have only as many digits as restore the float32.
    """
    if encoding_format == "base64":
        return [base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode() for vector in vectors]
    size, floats = len(vectors[0]), short_floats(np.concatenate(vectors))
    return [floats[start : start + size] for start in range(0, len(floats), size)]


def short_floats(values: npt.NDArray[np.float32]) -> list[float]:
    """Convert the values [n] to the floats with the fewest digits that become the same float32 again.

    Written exactly, a float32 takes up to 17 digits. Below 1e-13 and above 1e22 the result may have as many.
    """
    exact = values.astype(np.float64)
    short = exact.copy()
    left = np.flatnonzero(np.isfinite(exact) & (exact != 0.0))
    first = np.floor(np.log10(np.abs(exact[left]))).astype(np.int64)
    with np.errstate(over="ignore"):
        for digits in range(_FIRST_DIGITS, _LAST_DIGITS + 1):
            found = _rounded(exact[left], digits - 1 - first)
            same = found.astype(np.float32) == values[left]
            short[left[same]] = found[same]
            left, first = left[~same], first[~same]
    result: list[float] = short.tolist()
    return result


def _rounded(values: npt.NDArray[np.float64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Round to the floats nearest to the decimals with `places` places; negative places are tens, hundreds, ...

    Integers and powers of ten up to 1e22 are exact, so that their quotients and products are rounded only once.
    """
    powers = _POWERS[np.abs(places)]
    found: npt.NDArray[np.float64] = np.where(
        places >= 0, np.rint(values * powers) / powers, np.rint(values / powers) * powers
    )
    return found


def _usage(usages: Sequence[Usage]) -> Body:
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def _chat_logprobs(entries: Sequence[TokenLogprob] | None) -> Body | None:
    if entries is None:
        return None
    content = [
        {
            **_chat_token(entry.token, entry.logprob),
            "top_logprobs": [_chat_token(token, logprob) for _, token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: str, logprob: float) -> Body:
    # A token that is only a part of a character has no text of its own, so its bytes are unknown.
    known = None if "�" in token else list(token.encode())
    return {"token": token, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": known}


def _prompt_logprobs(entries: Sequence[TokenLogprob | None], count: int) -> list[Body | None]:
    """Return vLLM's form: for each token an object of token ids, the prompt's own and then the `count` likeliest."""
    found: list[Body | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        own = (entry.token_id, entry.token, entry.logprob)
        ranked = [(entry.rank, own), *((place, each) for place, each in enumerate(entry.top[:count], 1))]
        named: Body = {}
        for rank, (token_id, token, logprob) in ranked:
            value = {"logprob": max(logprob, _LEAST_LOGPROB), "rank": rank, "decoded_token": token}
            named.setdefault(str(token_id), value)
        found.append(named)
    return found


def _echoing_choice(index: int, echo: Echo, response: InferenceResponse, choice: Choice) -> Body:
    text, reason = echo.text + choice.text, choice.finish_reason
    if echo.logprobs is None:
        return _text_choice(index, text, None, reason)
    prompt = [entry for entry in response.prompt_logprobs or () if entry is not None]
    cut = [replace(entry, top=entry.top[: echo.logprobs]) for entry in prompt]
    body = _text_choice(index, text, [*cut, *(choice.logprobs or ())], reason, len(echo.first_token))
    logprobs = body["logprobs"]
    logprobs["tokens"].insert(0, echo.first_token)
    logprobs["token_logprobs"].insert(0, None)
    logprobs["top_logprobs"].insert(0, None)
    logprobs["text_offset"].insert(0, 0)
    return body


def _text_choice(
    index: int, text: str, entries: Sequence[TokenLogprob] | None, reason: FinishReason | None, offset: int = 0
) -> Body:
    """Return a choice of a text completion. `offset`: characters of the tokens before these."""
    logprobs = None
    if entries is not None:
        top = [{token: max(logprob, _LEAST_LOGPROB) for _, token, logprob in entry.top} for entry in entries]
        logprobs = {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [max(entry.logprob, _LEAST_LOGPROB) for entry in entries],
            "top_logprobs": top,
            "text_offset": [*accumulate((len(entry.token) for entry in entries), initial=offset)][:-1],
        }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
