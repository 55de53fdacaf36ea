"""Answers in the result lines of a job, reduced to the few values that people read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

AnswerKind: TypeAlias = Literal["text", "texts", "vector", "other"]


class Answer(NamedTuple):
    """The columns that a table of answers adds to a row."""

    answer: object
    """Text; calls of tools; a list of texts where several were asked for; the vector of an embedding, the label of a
    classification, the score of a pair, or lists of these. None after an error."""
    finish_reason: str | None
    """Why the first text ended."""
    error: str | None
    """Code and message of the error; None after an answer."""
    prompt_tokens: int | None
    completion_tokens: int | None
    cost: float | None = None
    """Dollars that it cost, where results say so."""


class _Message(msgspec.Struct):
    content: str
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage = msgspec.field(default_factory=_Usage)


class _Response(msgspec.Struct):
    body: _Body


class _UsualResult(msgspec.Struct):
    """A result with the usual kind of answer, which is read several times as fast as any other."""

    response: _Response
    error: None


_decode_usual = msgspec.json.Decoder(_UsualResult).decode


class _Result(msgspec.Struct):
    response: Any
    error: Any


_decode = msgspec.json.Decoder(_Result).decode


def answer_of(response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> tuple[AnswerKind | None, Answer]:
    """The columns for the `response` and the `error` of a result line, and the kind of the answer, None if none."""
    body = response.get("body") if response is not None else None
    if not isinstance(body, dict) or error is not None:
        reported = error or {"code": "no_response", "message": "the result has no response"}
        return None, Answer(None, None, f"{reported.get('code')}: {reported.get('message')}", None, None)
    kind, answer, reason = _contents_of(body)
    usage = body.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return kind, Answer(
        answer,
        reason,
        None,
        _count(counts.get("prompt_tokens", counts.get("input_tokens"))),
        _count(counts.get("completion_tokens", counts.get("output_tokens"))),
        cost if isinstance(cost := counts.get("cost"), float) else None,
    )


def _contents_of(body: Mapping[str, Any]) -> tuple[AnswerKind | None, object, str | None]:
    choices, vectors, items = body.get("choices"), body.get("data"), body.get("output")
    if isinstance(items, list):
        return _response(body, items)
    if isinstance(choices, list) and choices and all(isinstance(choice, dict) for choice in choices):
        texts = [_content(choice) for choice in choices]
        reason = choices[0].get("finish_reason")
        reason = reason if isinstance(reason, str) else None
        if not all(isinstance(text, str) for text in texts):
            return "other", texts[0] if len(texts) == 1 else texts, reason
        return ("text", texts[0], reason) if len(texts) == 1 else ("texts", texts, reason)
    if isinstance(vectors, list) and vectors and all(isinstance(vector, dict) for vector in vectors):
        if "label" in vectors[0]:
            labels = [each.get("label") for each in vectors]
            if not all(isinstance(label, str) for label in labels):
                return "other", labels[0] if len(labels) == 1 else labels, None
            return ("text", labels[0], None) if len(labels) == 1 else ("texts", labels, None)
        if "score" in vectors[0]:
            return "other", vectors[0]["score"] if len(vectors) == 1 else [each.get("score") for each in vectors], None
        found = [vector.get("embedding") for vector in vectors]
        if len(found) == 1 and isinstance(found[0], list):
            return "vector", found[0], None
        return "other", found[0] if len(found) == 1 else found, None
    return "other", body, None


def _response(body: Mapping[str, Any], items: list[Any]) -> tuple[AnswerKind | None, object, str | None]:
    """The content of an answer of `/v1/responses`: the texts of its messages as one, or its calls if it has any.

    None if the endpoint gave messages that are not in the form of texts.
    """
    calls = [item for item in items if isinstance(item, dict) and item.get("type") == "function_call"]
    contents = [content for item in items if isinstance(item, dict) and (content := item.get("content")) is not None]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    found = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "output_text"]
    texts = [text for text in found if isinstance(text, str)]
    details = body.get("incomplete_details")
    why = details.get("reason") if isinstance(details, dict) else body.get("status")
    reason = {"completed": "stop", "max_output_tokens": "length"}.get(str(why), why)
    reason = reason if isinstance(reason, str) else None
    if calls:
        return "other", calls, "tool_calls" if reason == "stop" else reason
    if not all(isinstance(each, list) for each in contents) or len(texts) < len(found):
        return None, None, reason
    return ("text", "".join(texts), reason) if texts else ("other", items, reason)


def _content(choice: Mapping[str, Any]) -> object:
    """What a choice says: its text, or its calls of tools if it has any."""
    message = choice.get("message")
    return (message.get("tool_calls") or message.get("content")) if isinstance(message, dict) else choice.get("text")


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**53 else None


def read_answer(result: bytes) -> tuple[AnswerKind | None, Answer]:
    """The columns for a result line, and the kind of the answer; None if there is none."""
    try:
        body = _decode_usual(result).response.body
    except msgspec.ValidationError:
        body = None
    if body is not None and len(body.choices) == 1:
        choice, usage = body.choices[0], body.usage
        text = choice.text if choice.message is None else choice.message.content
        if text is not None and not (choice.message is not None and choice.message.tool_calls):
            counts = usage.prompt_tokens, usage.completion_tokens
            return "text", Answer(text, choice.finish_reason, None, *counts, usage.cost)
    line = _decode(result)
    return answer_of(line.response, line.error)
