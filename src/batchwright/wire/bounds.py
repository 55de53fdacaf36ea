"""Size limits of the parts of a request body: items of lists, characters of texts, members of objects.

They apply to online requests, lines of batches and lines of `run` alike. A list that is too long is refused before its
items are looked at. The types and meanings of values are checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from batchwright.errors import InvalidRequest

_Name: TypeAlias = "str | tuple[_Name, str | int]"
"""Name of a field; of a value inside another one, the name of that one and the key or position in it.

It is only spelled out when the value is refused."""
_WITHOUT_SIZE = frozenset({int, float, bool, type(None)})

MAX_FIELDS = 128
"""Fields of a body: twice as many as there are known names."""
MAX_INPUTS = 2048
"""Prompts, or texts to embed, classify or rank, in one body, and completions that one body may ask for: OpenAI's limit.
"""
MAX_LOGPROBS = 2**20
"""Log-probabilities that one body may ask for: each takes half a kilobyte of the answer."""
MAX_TEXT = 10_485_760
"""Characters of a prompt or of a message's content: OpenAI's limit. The model's context is far below."""
MAX_TOKEN_IDS = 524_288
"""Token ids of all prompts of a body together: more than any context, and checked within 20 ms."""
MAX_MESSAGES = 2048
"""Messages of a chat: OpenAI's limit."""
MAX_PARTS = 4096
"""Parts of the contents of all messages of a chat together: two for each message."""
MAX_NAME = 64
"""Characters of the name of a participant or of a field: OpenAI's limit."""
MAX_MESSAGE_FIELDS = 32
"""Fields of a message, or of a part of one: more than any chat template reads."""
MAX_STOPS = 16
"""Stop strings: OpenAI takes 4, others 16."""
MAX_STOP = 256
"""Characters of a stop string; a stream may hold back as many."""
MAX_STOP_TOKENS = 256
"""Stop tokens: more than the end tokens of any model."""
MAX_BIASES = 1024
"""Token ids with a bias, each of which is added to the logits of every step: OpenAI takes 300."""
MAX_TOKEN_DIGITS = 10
"""Digits of a token id as a key of `logit_bias`."""
MAX_TOOLS = 128
"""Tools or functions, and calls of them in a message: OpenAI's limit."""
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
"""Pairs of `metadata`, and characters of their keys and values: OpenAI's limits."""
MAX_LABEL = 512
"""Characters of a text that only labels something, such as `user`: OpenAI's limits are 64 to 512."""
MAX_MODEL = 256
"""Characters of the name of a model: names on the hub have up to 96 after the owner's."""
MAX_PROMPTS = 65_536
"""Prompts of a simple batch, whatever the settings allow: larger batches belong in a file."""
MAX_VALUES = 10_000
"""Values, at all depths, of fields that are passed on or ignored unread, such as a JSON schema or a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The largest size of a value, for each JSON type."""

    characters: int = MAX_TEXT
    """Most characters of a text."""
    items: int | None = None
    """Most items of a list. None: the list has at most `MAX_VALUES` values at all depths."""
    numbers: int | None = None
    """Most items of a list whose first item is an integer, in place of `items`. Such items are not checked."""
    members: int | None = None
    """Most members of an object. None: the object has at most `MAX_VALUES` values at all depths."""
    key: int = MAX_NAME
    """Most characters of each key of an object, if `members` is set."""
    each: Bound | None = None
    """Bound of each item of a list, and of each value of an object. None: the default bound."""
    fields: Mapping[str, Bound] = field(default_factory=dict)
    """Bounds that replace `each` for some values of an object, by key."""

    def check(self, name: _Name, value: object) -> None:
        """Raise `InvalidRequest` naming what is too large: `name`, or a part of it such as `stop[3]`."""
        if isinstance(value, str):
            _require(name, len(value), self.characters, "characters", "string_above_max_length")
        elif isinstance(value, list):
            self._check_list(name, value)
        elif isinstance(value, Mapping):
            self._check_object(name, value)

    def _check_list(self, name: _Name, value: list[Any]) -> None:
        if self.numbers is not None and value and isinstance(value[0], int):
            _require(name, len(value), self.numbers, "entries", "array_above_max_length")
        elif self.items is None:
            _require_values(name, value)
        else:
            _require(name, len(value), self.items, "entries", "array_above_max_length")
            each = self.each or _ANYTHING
            for position, item in enumerate(value):
                if each.may_exceed(item):
                    each.check((name, position), item)

    def _check_object(self, name: _Name, value: Mapping[str, Any]) -> None:
        if self.members is None:
            _require_values(name, value)
            return
        _require(name, len(value), self.members, "members", "object_above_max_properties")
        each = self.each or _ANYTHING
        for key, item in value.items():
            if len(key) > self.key:
                what = f"a key of {_spelled(name)}"
                _require(name, len(key), self.key, "characters", "string_above_max_length", what=what)
            bound = self.fields.get(key, each)
            if bound.may_exceed(item):
                bound.check((name, key), item)

    def may_exceed(self, value: object) -> bool:
        """Return quickly whether `check` might refuse `value`; nearly all values are small."""
        if isinstance(value, str):
            return len(value) > self.characters
        return type(value) not in _WITHOUT_SIZE


_ANYTHING = Bound()
_LABEL = Bound(characters=MAX_LABEL)
_PROMPT = Bound(items=MAX_TOKEN_IDS, numbers=MAX_TOKEN_IDS)
_PROMPTS = Bound(items=MAX_INPUTS, numbers=MAX_TOKEN_IDS, each=_PROMPT)
_TOOLS = Bound(characters=MAX_NAME, items=MAX_TOOLS)
_MESSAGE = Bound(
    members=MAX_MESSAGE_FIELDS,
    fields={
        "role": Bound(characters=MAX_NAME),
        "name": Bound(characters=MAX_NAME),
        "content": Bound(items=MAX_PARTS, each=Bound(members=MAX_MESSAGE_FIELDS)),
        "tool_calls": _TOOLS,
        "tool_call_id": _LABEL,
    },
)
_BOUNDS: Mapping[str, Bound] = {
    "data_1": Bound(items=MAX_INPUTS),
    "data_2": Bound(items=MAX_INPUTS),
    "documents": Bound(items=MAX_INPUTS, each=Bound(members=MAX_MESSAGE_FIELDS)),
    "functions": _TOOLS,
    "input": _PROMPTS,
    "items": Bound(items=MAX_INPUTS),
    "logit_bias": Bound(members=MAX_BIASES, key=MAX_TOKEN_DIGITS),
    "messages": Bound(items=MAX_MESSAGES, each=_MESSAGE),
    "metadata": Bound(members=MAX_METADATA, key=MAX_METADATA_KEY, each=Bound(characters=MAX_METADATA_VALUE)),
    "model": Bound(characters=MAX_MODEL),
    "prompt": _PROMPTS,
    "prompt_cache_key": _LABEL,
    "prompt_cache_retention": _LABEL,
    "queries": Bound(items=MAX_INPUTS),
    "safety_identifier": _LABEL,
    "service_tier": _LABEL,
    "stop": Bound(characters=MAX_STOP, items=MAX_STOPS, each=Bound(characters=MAX_STOP)),
    "stop_token_ids": Bound(items=MAX_STOP_TOKENS),
    "text_1": Bound(items=MAX_INPUTS),
    "text_2": Bound(items=MAX_INPUTS),
    "tools": _TOOLS,
    "user": _LABEL,
}
"""Bounds of fields that differ from the default bound."""


def require_size(name: str, value: object) -> None:
    """Raise `InvalidRequest` if the field `name` of a body, or a part of it, is too large."""
    _BOUNDS.get(name, _ANYTHING).check(name, value)
    if name == "messages" and isinstance(value, list):
        contents = [message.get("content") for message in value if isinstance(message, Mapping)]
        parts = sum(len(content) for content in contents if isinstance(content, list))
        _require(name, parts, MAX_PARTS, "parts in all", "array_above_max_length")
    elif name in ("prompt", "input") and isinstance(value, list):
        ids = sum(len(prompt) for prompt in value if isinstance(prompt, list))
        _require(name, ids, MAX_TOKEN_IDS, "token ids in all", "array_above_max_length")


def require_sizes(body: Mapping[str, object]) -> None:
    """Raise `InvalidRequest` naming the first field of `body` that is too large."""
    require_few_fields(body)
    for name, value in body.items():
        require_size(name, value)


def require_few_fields(body: Mapping[str, object]) -> None:
    """Raise `InvalidRequest` if `body` has too many fields."""
    _require("", len(body), MAX_FIELDS, "fields", "object_above_max_properties", what="the body")


def _require_values(name: _Name, value: list[Any] | Mapping[str, Any]) -> None:
    left, found = [value], 1
    while left:
        container = left.pop()
        found += len(container)
        _require(name, found, MAX_VALUES, "values in all", "object_above_max_properties")
        items = container.values() if isinstance(container, Mapping) else container
        left += [item for item in items if isinstance(item, (list, Mapping))]


def _require(name: _Name, size: int, most: int, unit: str, code: str, *, what: str | None = None) -> None:
    if size > most:
        spelled = _spelled(name)
        raise InvalidRequest(
            f"{what or spelled} has {size:,} {unit}, the most is {most:,}", param=spelled or None, code=code
        )


def _spelled(name: _Name) -> str:
    if isinstance(name, str):
        return name
    within, part = name
    return f"{_spelled(within)}[{part}]" if isinstance(part, int) else f"{_spelled(within)}.{part}"
