"""The reference of the HTTP API, from its OpenAPI description."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.server.app import describe_api
from batchwright.server.reference.api_reference import FieldDescription, Operation, Type, read_reference


def page() -> str:
    """Return the page."""
    reference = read_reference(describe_api())
    parts = [
        "# HTTP",
        reference.description,
        "A running service shows the same at `/docs`, and the OpenAPI description at `/openapi.json`.",
    ]
    for name, operations in reference.sections.items():
        parts += [f"## {name}", *(part for operation in operations for part in _operation(operation))]
    parts.append("## Objects")
    for each in reference.objects:
        parts += [f"### {each.name} {{ #object-{each.name.lower()} }}", each.description, _table(each.fields)]
    return "\n\n".join(parts) + "\n"


def _operation(operation: Operation) -> list[str]:
    parts = [f"### `{operation.method} {operation.path}` {{ #{operation.id} }}", operation.description]
    if operation.parameters:
        parts.append(_table(operation.parameters, places=True))
    if operation.body is not None:
        parts.append(f"Body: {_type(operation.body)}, `{operation.content_type}`")
    if operation.fields:
        parts += [f"Body, `{operation.content_type}`:", _table(operation.fields)]
    if operation.answer is not None:
        parts.append(f"Answer: {_type(operation.answer)}")
    return parts


def _table(fields: Sequence[FieldDescription], *, places: bool = False) -> str:
    rows = ["| name | type | meaning |", "| --- | --- | --- |"]
    for field in fields:
        notes = [field.place] * places + ["required"] * field.required
        name = f"`{field.name}`" + (f" ({', '.join(notes)})" if notes else "")
        default = "" if field.default is None else f", default `{_cell(field.default)}`"
        rows.append(f"| {name} | {_type(field.type)}{default} | {_cell(field.description)} |")
    return "\n".join(rows)


def _type(kind: Type) -> str:
    pieces = (f"[{piece}](#object-{piece.lower()})" if linked else _cell(piece) for piece, linked in kind.parts())
    return "".join(pieces)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
