"""What validators say about an answer: the reference one in Python, and `jsonschema_rs`."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any

import jsonschema
import jsonschema_rs
from referencing import Registry
from referencing.jsonschema import SchemaRegistry

_NOWHERE: SchemaRegistry = Registry()
"""Registry that fetches no external schemas."""


@dataclass(frozen=True, slots=True)
class Validators:
    """Validators of one schema in its own draft; None for one that cannot read it."""

    reference: Any
    other: Any

    @classmethod
    def of(cls, schema: dict[str, Any]) -> Validators:
        """Return the validators of `schema`."""
        return cls(_reference(schema), _other(schema))

    def rejections(self, text: str) -> list[str]:
        """Return what each validator that rejects an answer says of it, first of all if it is no JSON."""
        try:
            value = json.loads(text, parse_float=_finite, parse_constant=_no_number)
        except ValueError as error:
            return [f"not JSON: {error}"]
        return [*self._of_reference(value), *self._of_other(value)]

    def _of_reference(self, value: Any) -> list[str]:
        if self.reference is None:
            return []
        try:
            found = next(iter(self.reference.iter_errors(value)), None)
        except Exception:  # a reference to a schema elsewhere, or a pattern that is none in Python
            return []
        if found is None:
            return []
        return [f"jsonschema, {found.validator}: {found.message[:300]}"]

    def _of_other(self, value: Any) -> list[str]:
        if self.other is None or self.other.is_valid(value):
            return []
        found = next(iter(self.other.iter_errors(value)))
        return [f"jsonschema_rs: {found.message[:300]}"]


def _reference(schema: dict[str, Any]) -> Any:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except Exception:  # a schema that is none, or one with a pattern that is none in Python
        return None
    return kind(schema, registry=_NOWHERE, format_checker=kind.FORMAT_CHECKER)


def _other(schema: dict[str, Any]) -> Any:
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True, offline=True)
    except (jsonschema_rs.ValidationError, ValueError):
        return None


def _finite(number: str) -> float:
    """A number as a float, which for 1e999 is infinite and then none for a validator."""
    read = float(number)
    return math.copysign(sys.float_info.max, read) if math.isinf(read) else read


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")
