"""The OpenAPI description as sections of operations and tables of fields. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_REF = "#/components/schemas/"
_INTERNAL = frozenset({"HTTPValidationError", "ValidationError"})
"""Schemas of FastAPI's own errors, which the service does not send."""
_LONGEST_CHOICE = 12
_LAST = ("Not supported.", "Changes nothing.")
"""Descriptions of fields that are listed last."""


@dataclass(frozen=True, slots=True)
class Type:
    """The type of a value, in words."""

    text: str
    links: tuple[str, ...] = ()
    """Names in `text` of objects that have a description of their own."""

    def parts(self) -> Iterator[tuple[str, bool]]:
        """Yield pieces of the text, and whether each is the name of an object."""
        for piece in re.split(rf"\b({'|'.join(self.links)})\b" if self.links else r"(?!)", self.text):
            if piece:
                yield piece, piece in self.links


@dataclass(frozen=True, slots=True)
class FieldDescription:
    """A field of an object, or a parameter of an operation."""

    name: str
    type: Type
    required: bool
    default: str | None
    """As JSON; None where there is none worth mentioning."""
    description: str
    place: str = "body"
    """`path`, `query`, `header` or `body`."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the API: a method and a path."""

    id: str
    method: str
    path: str
    title: str
    description: str
    parameters: tuple[FieldDescription, ...]
    body: Type | None
    """Type of the body; None: there is none."""
    fields: tuple[FieldDescription, ...]
    """Fields of a body that is an object without a name, such as a form."""
    content_type: str
    """Content type of the body; empty if there is none."""
    answer: Type | None
    """Type of the body of a success; None where it is described in words only."""


@dataclass(frozen=True, slots=True)
class ObjectDescription:
    """An object of the API."""

    name: str
    description: str
    fields: tuple[FieldDescription, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """The whole API."""

    title: str
    version: str
    description: str
    sections: Mapping[str, list[Operation]]
    """Operations by subject."""
    objects: tuple[ObjectDescription, ...]


def read_reference(openapi: Mapping[str, Any]) -> Reference:
    """Return what an OpenAPI description says."""
    sections: dict[str, list[Operation]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            [tag] = operation.get("tags") or ["Other"]
            sections.setdefault(tag, []).append(_operation(method, path, operation))
    schemas = openapi.get("components", {}).get("schemas", {})
    objects = [
        ObjectDescription(name, schema.get("description", ""), _fields(schema))
        for name, schema in sorted(schemas.items())
        if name not in _INTERNAL and "properties" in schema
    ]
    info = openapi["info"]
    return Reference(info["title"], info["version"], info.get("description", ""), sections, tuple(objects))


def type_of(schema: Mapping[str, Any]) -> Type:
    """Return the type that a schema describes."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return Type(name, (name,))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            found = [type_of(each) for each in schema[key]]
            texts = dict.fromkeys(each.text for each in found)
            return Type(" or ".join(texts), tuple(dict.fromkeys(link for each in found for link in each.links)))
    if "const" in schema:
        return Type(json.dumps(schema["const"]))
    if "enum" in schema:
        choices = [json.dumps(each) for each in schema["enum"]]
        shown = choices if len(choices) <= _LONGEST_CHOICE else [*choices[:_LONGEST_CHOICE], "…"]
        return Type(" or ".join(shown))
    kinds = schema.get("type")
    if isinstance(kinds, list):
        found = [type_of({**schema, "type": kind}) for kind in kinds]
        return Type(" or ".join(each.text for each in found), tuple(link for each in found for link in each.links))
    if kinds == "array":
        items = type_of(schema.get("items", {}))
        return Type(f"list of {items.text}" if " or " not in items.text else f"list of ({items.text})", items.links)
    return Type(f"{kinds or 'any value'}{_bounds(schema) if kinds in ('integer', 'number') else ''}")


def _bounds(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {_number(low)} to {_number(high)}"
    if low is not None:
        return f" ≥ {_number(low)}"
    return "" if high is None else f" ≤ {_number(high)}"


def _number(value: float) -> str:
    whole = int(value)
    if whole != value:
        return f"{value:g}"
    return f"{whole:,}" if abs(whole) < 2**53 else "-2⁶³" if whole < 0 else "2⁶³"


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Operation:
    contents: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
    content_type = next(iter(contents), "")
    schema = contents[content_type].get("schema") if contents else None
    named = schema is not None and "properties" not in schema
    answers: dict[str, Any] = operation.get("responses", {}).get("200", {}).get("content", {})
    answer = next((each["schema"] for each in answers.values() if each.get("schema")), None)
    return Operation(
        id=re.sub(r"\W+", "-", f"{method}{path}").strip("-").lower(),
        method=method.upper(),
        path=re.sub(r":\w+}", "}", path),
        title=operation.get("summary", "").capitalize(),
        description=operation.get("description", ""),
        parameters=tuple(
            _field(each["name"], {**each["schema"], **_description(each)}, bool(each.get("required")), each["in"])
            for each in operation.get("parameters", ())
        ),
        body=type_of(schema) if schema is not None and named else None,
        fields=() if schema is None or named else _fields(schema),
        content_type=content_type,
        answer=None if answer is None else type_of(answer),
    )


def _description(parameter: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": parameter["description"]} if parameter.get("description") else {}


def _fields(schema: Mapping[str, Any]) -> tuple[FieldDescription, ...]:
    required = set(schema.get("required", ()))
    fields = [_field(name, each, name in required) for name, each in schema["properties"].items()]
    return tuple(sorted(fields, key=lambda field: (not field.required, field.description in _LAST)))


def _field(name: str, schema: Mapping[str, Any], required: bool, place: str = "body") -> FieldDescription:
    default = schema.get("default")
    shown = None if default in (None, "") or isinstance(default, dict) else json.dumps(default)
    description = " ".join(str(schema.get("description", "")).split())
    return FieldDescription(name, type_of(schema), required, shown, description, place)
