"""Columns of a table of answers that are JSON: one for each property of the job's schema, with its type."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from batchwright.constraints import schema_of

ValueKind: TypeAlias = Literal["integer", "number", "boolean", "string", "json"]

_KINDS: Mapping[str, ValueKind] = {
    "integer": "integer", "number": "number", "boolean": "boolean", "string": "string",
}  # fmt: skip
_OF_VALUES: Mapping[type, ValueKind] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_MOST_REFERENCES = 16
"""Most references that are followed in a row: one of them may lead back to the first."""
_MOST_LEVELS = 4
"""Most levels of lists and of options, as in `anyOf`, that are looked into, for the same reason."""
_MOST_OF_FLOATS = 1e308


class TooLargeForColumn(Exception):
    """A whole number of more than 64 bits does not fit into a column of whole numbers."""

    def __init__(self, column: PropertyColumn) -> None:
        super().__init__(column.name)
        self.column = column


@dataclass(frozen=True, slots=True)
class PropertyColumn:
    """Column of one property."""

    name: str
    kind: ValueKind
    """Type of its values; "json" for objects and for values that may be of several types."""
    is_list: bool = False
    """Whether each value is a list of such values."""

    def typed(self, value: object) -> object:
        """Return a value as this column holds it: JSON as text, and None for a value of another type.

        Raises `TooLargeForColumn`.
        """
        if value is None or self.kind == "json":
            return None if value is None else json.dumps(value, ensure_ascii=False)
        if not self.is_list:
            return self._typed(value)
        if not isinstance(value, list):
            return None
        items = [self._typed(item) for item in value]
        lost = any(item is None and given is not None for item, given in zip(items, value, strict=True))
        return None if lost else items

    def _typed(self, value: object) -> object:
        if self.kind in ("boolean", "string"):
            return value if isinstance(value, bool if self.kind == "boolean" else str) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if self.kind == "number":
            return float(value) if abs(value) < _MOST_OF_FLOATS else None
        # JSON has one type of numbers: 3.0 is whole.
        if value != value // 1:
            return None
        if not -(2**63) <= value < 2**63:
            raise TooLargeForColumn(self)
        return int(value)


def columns_of(schema: object) -> tuple[PropertyColumn, ...]:
    """Return the columns for a schema, or a class that has one; none if its answers are not objects, or for None."""
    if schema is None:
        return ()
    root = schema_of(schema)
    properties = _resolved(root, root).get("properties")
    if not isinstance(properties, Mapping):
        return ()
    return tuple(PropertyColumn(name, *_value_type(each, root)) for name, each in properties.items())


def values_of(columns: Sequence[PropertyColumn], answer: object) -> list[object]:
    """Return the values of the properties in an answer, or in the first of several; None where it has none."""
    text = answer[0] if isinstance(answer, list) and answer else answer
    found: object = None
    if columns and isinstance(text, str):
        try:
            found = _plain(json.loads(text)) if "\\ud" in text.lower() else json.loads(text)
        except (ValueError, RecursionError):
            found = None  # it was cut
    values = found if isinstance(found, dict) else {}
    return [values.get(column.name) for column in columns]


def _plain(value: object) -> object:
    """Return a JSON value in which lone surrogates, which no file can hold, are question marks."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _value_type(schema: object, root: Mapping[str, Any], left: int = _MOST_LEVELS) -> tuple[ValueKind, bool]:
    """Return the type of values other than null, and whether they are lists of values of that type."""
    resolved = _resolved(schema, root)
    values = [resolved["const"]] if "const" in resolved else resolved.get("enum")
    if isinstance(values, list):
        return _common_type({(_OF_VALUES.get(type(value), "json"), False) for value in values if value is not None})
    given = _type_of(resolved)
    if given == "array" and left:
        kind, is_list = _value_type(resolved.get("items"), root, left - 1)
        return ("json", False) if kind == "json" or is_list else (kind, True)
    if given is None and left:
        options = [each for each in _options(resolved) if not _is_null(_resolved(each, root))]
        return _common_type({_value_type(each, root, left - 1) for each in options})
    return _KINDS.get(str(given), "json"), False


def _common_type(found: set[tuple[ValueKind, bool]]) -> tuple[ValueKind, bool]:
    if len(found) == 1:
        return found.pop()
    kinds, are_lists = {kind for kind, _ in found}, {is_list for _, is_list in found}
    return ("number", are_lists.pop()) if kinds == {"integer", "number"} and len(are_lists) == 1 else ("json", False)


def _options(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of which a value matches one; those of `allOf`, which must all match, only if there is one."""
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        if isinstance(options, list) and (name != "allOf" or len(options) == 1):
            return options
    return []


def _is_null(schema: Mapping[str, Any]) -> bool:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return schema.get("type") == "null" or values == [None]


def _type_of(schema: Mapping[str, Any]) -> object:
    """Return the type of values other than null; None if the schema names none or several."""
    given = schema.get("type")
    if not isinstance(given, list):
        return given
    others = {str(each) for each in given} - {"null"}
    return "number" if others == {"integer", "number"} else others.pop() if len(others) == 1 else None


def _resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the one that it refers to within `root`."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return {}
