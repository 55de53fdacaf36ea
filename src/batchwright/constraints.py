"""Constraints: the form that the text of an answer must have, as JSON, one of several texts, a pattern or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from batchwright.errors import InvalidRequest, shown

ConstraintKind: TypeAlias = Literal["schema", "json_object", "regex", "choices", "grammar"]
"""Kinds of constraints, by the field of `SamplingParams` that gives one."""

MAX_CHARACTERS = 262_144
"""Most characters of a constraint: OpenAI takes schemas of about half as many."""
MAX_CHOICES = 10_000
MAX_NESTING = 100
"""Most levels of objects and lists in a schema: the parser of schemas takes 127."""

_REASON_SHOWN = 150
"""Characters of a library's reason that are shown."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of an answer must match."""

    kind: ConstraintKind
    text: str
    """The schema or the choices as JSON, the regular expression, or the grammar; empty for any JSON object."""
    around: str = ""
    """Lark grammar of the whole text, in which `@answer` is what must match; empty if that is the whole text."""


def schema_of(given: object) -> Mapping[str, Any]:
    """Return `given` if it is a JSON Schema as a mapping, or the schema of a class or type.

    Classes may be pydantic models, dataclasses, and whatever msgspec has a schema for, such as `list[int]`. Objects of
    a class have no properties other than its fields. Raises `InvalidRequest`.
    """
    if isinstance(given, Mapping):
        return given
    try:
        if given is object:
            raise TypeError("object is any value")
        return _schema_of_type(given)
    except Exception as error:  # a model's own code may raise anything
        reason = "" if given is object else f" ({' '.join(str(error).split())[:_REASON_SHOWN]})"
        raise InvalidRequest(
            f"schema={shown(given)}: must be a JSON Schema as a dict, or a type with a schema of its own: a pydantic "
            f"model, a dataclass, or one such as list[int]; json_object=True is for any object{reason}",
            param="schema",
        ) from error


def parsed_as(given: object, text: str) -> Any:
    """Return the value of `text`, JSON that satisfies the schema `given`; an instance of `given` if that is a class.

    Raises ValueError if the text is not such JSON, for instance because it was cut short.
    """
    if given is None or isinstance(given, Mapping):
        return json.loads(text)
    if _is_of_pydantic(given):
        return _adapter(given).validate_json(text)
    kind: Any = given
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def require_constraint(
    *, schema: object, json_object: object, regex: object, choices: Sequence[object], grammar: object
) -> None:
    """Raise `InvalidRequest` if more than one constraint is given, or if it is too large."""
    fields = {"schema": schema, "json_object": json_object, "regex": regex, "choices": choices, "grammar": grammar}
    none = {"schema": None, "json_object": False, "regex": None, "choices": (), "grammar": None}
    given = [name for name, value in fields.items() if value is not none[name] and value != ()]
    if len(given) > 1:
        raise InvalidRequest(
            f"{' and '.join(given)} are given together: an answer can have one form, give one of them", param=given[1]
        )
    if "schema" in given:
        require_schema("schema", schema_of(schema))
    if "choices" in given:
        _require_choices(choices)
    for name in ("regex", "grammar"):
        if name in given:
            value = fields[name]
            if not isinstance(value, str) or not value:
                raise InvalidRequest(f"{name}={shown(value)}: must be a text that is not empty", param=name)
            _require_size(name, len(value))


def constraint_of(
    *, schema: object, json_object: bool, regex: str | None, choices: Sequence[str], grammar: str | None
) -> Constraint | None:
    """Return the constraint of fields that `require_constraint` has checked, None if none is set."""
    if schema is not None:
        return Constraint("schema", _compact(schema_of(schema)))
    if json_object:
        return Constraint("json_object", "")
    if regex is not None:
        return Constraint("regex", regex)
    if choices:
        return Constraint("choices", _compact(list(choices)))
    return None if grammar is None else Constraint("grammar", grammar)


def require_schema(name: str, schema: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest`, naming the field, for a schema that is not JSON, nested too deeply or too large."""
    _require_nesting(name, schema)
    try:
        text = _compact(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}: must be JSON ({error})", param=name) from error
    _require_size(name, len(text))


def _require_nesting(name: str, schema: Mapping[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, Mapping) else each)
            if isinstance(inner, (Mapping, list))
        ]
        if not level:
            return
    raise InvalidRequest(f"{name} is nested more than {MAX_NESTING} levels deep", param=name)


def _require_choices(choices: Sequence[object]) -> None:
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"choices has {len(choices):,} texts, the most is {MAX_CHOICES:,}", param="choices")
    for text in choices:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(
                f"choices={shown(text)}: each choice must be a text of at least one character", param="choices"
            )
    _require_size("choices", sum(len(str(text)) for text in choices))


def _require_size(name: str, characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise InvalidRequest(f"{name} has {characters:,} characters, the most is {MAX_CHARACTERS:,}", param=name)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@lru_cache(maxsize=256)
def _schema_of_type(given: Any) -> dict[str, Any]:
    if isinstance(given, (str, bytes, int, float, list, tuple, type(None))):
        raise TypeError(f"a value of type {type(given).__name__} is no type")
    schema = _adapter(given).json_schema() if _is_of_pydantic(given) else msgspec.json.schema(given)
    _close_objects(schema)
    return schema


def _close_objects(schema: Any) -> None:
    """Forbid properties that are not named, in every object of `schema` that does not say whether to allow them."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
            schema.setdefault("additionalProperties", False)
        for inner in schema.values():
            _close_objects(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _close_objects(inner)


def _is_of_pydantic(given: object) -> bool:
    """Whether a type is one of pydantic's, or is made of some, as `list[Model]` is."""
    if hasattr(given, "__pydantic_core_schema__") or hasattr(given, "__pydantic_validator__"):
        return True
    return any(_is_of_pydantic(each) for each in get_args(given))


@lru_cache(maxsize=256)
def _adapter(given: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(given)
