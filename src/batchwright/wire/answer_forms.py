"""The form that a body requests for its answer: OpenAI's `response_format`, and vLLM's fields for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from batchwright.errors import InvalidRequest, shown
from batchwright.request import FORM_FIELDS, SamplingParams

FORM_NAMES = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
"""Fields of a body that ask for a form; only one may be set."""

_GRAMMARS = ("structured_outputs", "guided_grammar", "tools")
"""Fields from which a grammar may come."""

_Found: TypeAlias = tuple[str, str, Any]
"""Place in the body that asks for a form, and the field of `SamplingParams` with its value."""

_NO_FORM: Mapping[str, Any] = {name: getattr(SamplingParams(), name) for name in FORM_FIELDS}
_STRUCTURED = {"json": "schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}
"""Fields of `SamplingParams` by vLLM's names for them in `structured_outputs`, and after `guided_`."""


def form_overrides(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of `SamplingParams` for the form that `body` asks for, none if it does not mention a form.

    Raises `InvalidRequest` for an invalid value, and for more than one form, naming the fields.
    """
    mentioned = False
    found: list[_Found] = []
    for name in FORM_NAMES:
        if (value := body.get(name)) is None:
            continue
        mentioned = True
        if name == "response_format":
            found += _of_response_format(value)
        elif name == "structured_outputs":
            found += _of_structured_outputs(value)
        else:
            found.append(_checked(name, _STRUCTURED[name.removeprefix("guided_")], value))
    if len(found) > 1:
        names = [where for where, _, _ in found]
        raise InvalidRequest(
            f"{' and '.join(names)} are given together: an answer can have one form, give one of them", param=names[1]
        )
    return {**_NO_FORM, **{field: value for _, field, value in found}} if mentioned else {}


def named_in_body(error: InvalidRequest, body: Mapping[str, Any]) -> InvalidRequest:
    """Return `error` naming the field of `body` that asks for a form, if the error is about that form."""
    # A required call is constrained to the schemas of the tools by a grammar.
    able = _GRAMMARS if error.param == "grammar" else FORM_NAMES
    names = [name for name in able if body.get(name) is not None]
    if error.param in FORM_FIELDS and names:
        text = str(error).removeprefix(f"{error.param}: ").removeprefix(f"{error.param} ")
        return InvalidRequest(f"{names[0]}: {text}", param=names[0], code=error.code)
    return error


def form_fields(defaults: Mapping[str, Any], *, responses: bool) -> dict[str, Any]:
    """Return the fields of a body for the form in `defaults`, fields of `SamplingParams`; none if there is no form.

    `responses`: for `/v1/responses`, which has a field of its own for schemas.
    """
    schema = defaults.get("schema")
    if schema is not None or defaults.get("json_object"):
        named: dict[str, Any] = {"name": "answer", "schema": schema, "strict": True}
        form: dict[str, Any] = {"type": "json_object"}
        if schema is not None:
            form = {"type": "json_schema", **(named if responses else {"json_schema": named})}
        return {"text": {"format": form}} if responses else {"response_format": form}
    for theirs, ours in _STRUCTURED.items():
        if value := defaults.get(ours):
            return {"structured_outputs": {theirs: value}}
    return {}


def _of_response_format(value: object) -> list[_Found]:
    name = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(
            f"{name}={shown(value)}: must be an object whose type is text, json_object or json_schema",
            param=name,
            code="unsupported_parameter",
        )
    if kind == "text":
        return []
    if kind == "json_object":
        # Several servers accept a schema here.
        if (schema := value.get("schema")) is not None:
            of_object = {"type": "object", **schema} if isinstance(schema, Mapping) else schema
            return [_checked(f"{name}.schema", "schema", of_object)]
        return [(name, "json_object", True)]
    given = value.get("json_schema")
    if not isinstance(given, Mapping) or given.get("schema") is None:
        raise InvalidRequest(
            f"{name}.json_schema.schema is missing: give the schema of the answer",
            param=f"{name}.json_schema",
            code="missing_required_parameter",
        )
    return [_checked(f"{name}.json_schema.schema", "schema", given["schema"])]


def _of_structured_outputs(value: object) -> list[_Found]:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name}={shown(value)}: must be an object", param=name)
    found: list[_Found] = []
    for key, given in value.items():
        if given is None:
            continue
        where = f"{name}.{key}"
        if key == "json_object":
            if not isinstance(given, bool):
                raise InvalidRequest(f"{where}={shown(given)}: must be true or false", param=where)
            found += [(where, "json_object", True)] if given else []
        elif key in _STRUCTURED:
            found.append(_checked(where, _STRUCTURED[key], given))
        else:
            raise InvalidRequest(
                f"{name} has {shown(key)}: choose from {', '.join(_STRUCTURED)} and json_object",
                param=name,
                code="unsupported_parameter",
            )
    if all(given is None for given in value.values()):
        raise InvalidRequest(
            f"{name} asks for nothing: give {', '.join(_STRUCTURED)} and json_object, or leave it out",
            param=name,
        )
    return found


def _checked(where: str, field: str, value: Any) -> _Found:
    if field == "schema" and isinstance(value, str) and not where.startswith("response_format"):
        value = _read_schema(where, value)  # as in vLLM
    if field == "schema" and not isinstance(value, Mapping):
        raise InvalidRequest(f"{where}={shown(value)}: must be a JSON Schema as an object", param=where)
    if field == "choices":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise InvalidRequest(
                f"{where}={shown(value)}: must be a list of texts, none of them empty, and at least one", param=where
            )
        return where, field, tuple(value)
    if field in ("regex", "grammar") and (not isinstance(value, str) or not value):
        raise InvalidRequest(f"{where}={shown(value)}: must be a text that is not empty", param=where)
    return where, field, value


def _read_schema(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}={shown(text)}: is not JSON ({error})", param=where) from error
