"""Answers that should be JSON and are not: which lines are sent again, and with which body. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchwright.errors import InvalidRequest
from batchwright.request import SamplingParams
from batchwright.wire.answer_forms import form_overrides
from batchwright.wire.fields import MAX_TOKENS, RANGES, limit_field
from batchwright.wire.requests import COMPLETION_LIMIT, COMPLETION_URL, ENCODER_URLS, RESPONSES_URL
from batchwright.wire.text_responses import form_of_response

INVALID_JSON = "invalid_json"
"""Finish reason of an answer that should be JSON and is not, after all tries."""


@dataclass(slots=True)
class _Line:
    """Tries of a line so far."""

    tries: int
    body: Mapping[str, Any]
    answer: dict[str, Any]
    """The latest answer."""


class InvalidAnswers:
    """Decides about lines whose answers should be JSON: most of those that are not were cut by their `max_tokens`.

    Each is sent again at most `most` times, with twice the tokens, or as many as the context still holds, and with the
    next seed if it has one. A line that could only get the same answer is not sent again. `defaults`: the parameters
    that the job gives to lines.
    """

    def __init__(self, most: int, defaults: SamplingParams | Mapping[str, Any]) -> None:
        self._most = most
        self._defaults = vars(defaults) if isinstance(defaults, SamplingParams) else defaults
        self._lines: dict[int, _Line] = {}

    def again(
        self, number: int, endpoint: str, body: Mapping[str, Any], answer: dict[str, Any]
    ) -> Mapping[str, Any] | None:
        """Return the body with which to ask line `number` once more; None if its `answer` is final."""
        if endpoint in ENCODER_URLS or not self._wants_json(endpoint, body) or not invalid_texts(answer):
            return None
        if body.get("echo"):
            return None  # its texts begin with the prompt
        line = self._lines.setdefault(number, _Line(0, body, answer))
        larger = self._larger(endpoint, line.body)
        if line.tries == self._most or larger is None:
            return None
        line.tries += 1
        line.answer, line.body = answer, larger
        return larger

    def filling(self, number: int, endpoint: str) -> Mapping[str, Any] | None:
        """Return the body with which to ask line `number` for as many tokens as fit, when twice its tokens do not.

        None if that was requested already, or the line is not sent again.
        """
        line = self._lines.get(number)
        if line is None:
            return None
        name = _limit_name(endpoint, line.body)
        if line.body.get(name) in (None, MAX_TOKENS):
            return None
        line.body = {**line.body, name: MAX_TOKENS}
        return line.body

    def settled(self, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the last answer to line `number` as it is written: each text that is still not JSON says so."""
        if self._lines.pop(number, None) is None:
            return answer
        invalid = invalid_texts(answer)
        if "output" in answer:
            incomplete = {"status": "incomplete", "incomplete_details": {"reason": INVALID_JSON}}
            return {**answer, **incomplete} if invalid else answer
        choices = [
            {**choice, "finish_reason": INVALID_JSON} if place in invalid else choice
            for place, choice in enumerate(answer["choices"])
        ]
        return {**answer, "choices": choices}

    def latest(self, number: int) -> dict[str, Any] | None:
        """Return the answer that line `number` has if no better one comes; None if it has none yet."""
        line = self._lines.get(number)
        return None if line is None else line.answer

    def _wants_json(self, endpoint: str, body: Mapping[str, Any]) -> bool:
        try:
            asked = {"response_format": form_of_response(body)} if endpoint == RESPONSES_URL else body
            form = form_overrides(asked) or self._defaults
        except InvalidRequest:
            return False  # how an endpoint elsewhere interprets it is not known
        return form.get("schema") is not None or bool(form.get("json_object"))

    def _larger(self, endpoint: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the body for another try; None if its answer could only be the same."""

        def given(name: str, usual: Any = None) -> Any:
            return usual if body.get(name) is None else body[name]

        changed: dict[str, Any] = {}
        name = _limit_name(endpoint, body)
        usual = COMPLETION_LIMIT if endpoint == COMPLETION_URL else None
        limit = given(name, self._defaults.get("max_tokens", usual))
        if type(limit) is int and limit < MAX_TOKENS:
            changed[name] = min(2 * limit, MAX_TOKENS)
        elif given("temperature", self._defaults.get("temperature")) == 0:
            return None
        seed = given("seed", self._defaults.get("seed"))
        if type(seed) is int:
            changed["seed"] = seed + 1 if seed < RANGES["seed"][1] else 0
        return {**body, **changed}


def _limit_name(endpoint: str, body: Mapping[str, Any]) -> str:
    """Return the name of the field with the limit of a body's answer, whether or not it is set."""
    return limit_field(body) or ("max_output_tokens" if endpoint == RESPONSES_URL else "max_tokens")


def invalid_texts(answer: Mapping[str, Any]) -> set[int]:
    """Return the indices of the texts in an answer that are not JSON: of its choices, or of its output items."""
    choices = answer.get("output" if "output" in answer else "choices")
    return {
        place
        for place, choice in enumerate(choices if isinstance(choices, list) else ())
        if isinstance(text := _text(choice), str) and not _is_json(text)
    }


def marked_invalid(answer: Mapping[str, Any]) -> int:
    """Return how many texts of a settled answer say that they are not JSON."""
    if isinstance(details := answer.get("incomplete_details"), Mapping):
        return int(details.get("reason") == INVALID_JSON)
    choices = answer.get("choices")
    return sum(
        isinstance(choice, Mapping) and choice.get("finish_reason") == INVALID_JSON
        for choice in (choices if isinstance(choices, list) else ())
    )


def _text(choice: object) -> object:
    if not isinstance(choice, Mapping):
        return None
    if choice.get("type") == "message":  # of an answer of `/v1/responses`
        return _output_text(choice.get("content"))
    message = choice.get("message")
    return message.get("content") if isinstance(message, Mapping) else choice.get("text")


def _output_text(content: object) -> str | None:
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if part.get("type") == "output_text"]
    return "".join(text for text in texts if isinstance(text, str)) if texts else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
