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
"""References that follow each other: one of them may lead back to the first."""
_MOST_ANY_OF = 4
"""Levels of `anyOf` that are looked into, for the same reason."""
_MOST_OF_FLOATS = 1e308


@dataclass(frozen=True, slots=True)
class PropertyColumn:
    """Column of one property."""

    name: str
    kind: ValueKind
    """Type of its values; "json" for objects and for what may be of several types."""
    is_list: bool = False
    """Whether each value is a list of such values."""

    def typed(self, value: object) -> object:
        """Return a value as this column holds it: JSON as text, and None for a value of another type."""
        if value is None or self.kind == "json":
            return None if value is None else json.dumps(value, ensure_ascii=False)
        if not self.is_list:
            return _typed(self.kind, value)
        if not isinstance(value, list):
            return None
        items = [_typed(self.kind, item) for item in value]
        lost = any(item is None and given is not None for item, given in zip(items, value, strict=True))
        return None if lost else items


def columns_of(schema: object) -> tuple[PropertyColumn, ...]:
    """Return the columns for a schema, or a class that has one; none if its answers are no objects, or for None."""
    if schema is None:
        return ()
    root = schema_of(schema)
    properties = _resolved(root, root).get("properties")
    if not isinstance(properties, Mapping):
        return ()
    return tuple(_column(name, each, root) for name, each in properties.items())


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
    """Return a JSON value in which halves of characters, which no file can hold, are question marks."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _column(name: str, schema: object, root: Mapping[str, Any]) -> PropertyColumn:
    resolved = _resolved(schema, root)
    if _type_of(resolved) == "array":
        kind = _kind(_resolved(resolved.get("items"), root), root)
        return PropertyColumn(name, kind, is_list=kind != "json")
    return PropertyColumn(name, _kind(resolved, root))


def _kind(schema: Mapping[str, Any], root: Mapping[str, Any], left: int = _MOST_ANY_OF) -> ValueKind:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kinds = {_OF_VALUES.get(type(value), "json") for value in values if value is not None}
        return kinds.pop() if len(kinds) == 1 else "number" if kinds == {"integer", "number"} else "json"
    if isinstance(options := schema.get("anyOf"), list) and left:
        kinds = {_kind(_resolved(each, root), root, left - 1) for each in options if each != {"type": "null"}}
        return kinds.pop() if len(kinds) == 1 else "json"
    return _KINDS.get(str(_type_of(schema)), "json")


def _type_of(schema: Mapping[str, Any]) -> object:
    """Return the type that values have beside null."""
    given = schema.get("type")
    if not isinstance(given, list):
        return given
    others = [each for each in given if each != "null"]
    return others[0] if len(others) == 1 else None


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


def _typed(kind: ValueKind, value: object) -> object:
    if kind in ("boolean", "string"):
        return value if isinstance(value, bool if kind == "boolean" else str) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if kind == "number":
        return float(value) if abs(value) < _MOST_OF_FLOATS else None
    # JSON has one type of numbers: 3.0 is whole.
    return int(value) if value == value // 1 and -(2**63) <= value < 2**63 else None
