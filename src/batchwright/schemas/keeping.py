"""Schemas rewritten so that llguidance keeps what it would otherwise silently relax, or refused where it cannot.

llguidance refuses the keywords that it does not know. What is here is about those that it knows and takes otherwise
than validators do: each rule names its reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import count
from typing import Any, TypeAlias, TypeGuard

from batchwright.schemas.formats import NARROWER
from batchwright.schemas.one_of import narrowed, narrowings, target
from batchwright.schemas.patterns import in_rust

_Part: TypeAlias = dict[str, Any]

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with schemas by names of anyone's choice."""
_DATA = ("const", "enum", "default", "examples", "example", "required", "type", "dependentRequired")
"""Keywords whose values are no schemas, whatever they look like."""
_FOLLOWERS = {
    "items": "additionalItems",
    "patternProperties": "additionalProperties",
    "minimum": "exclusiveMinimum",
    "maximum": "exclusiveMaximum",
}
"""Keywords that mean something only with another one, by that one."""
_LATEST = "https://json-schema.org/draft/2020-12/schema"
"""The draft of a schema that does not say one."""
_OLD_DRAFTS = re.compile(r"json-schema\.org/draft-0[0-3]/")
_DRAFTS_OF_CONTENT = re.compile(r"json-schema\.org/draft-0[67]/")
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
_MOST_OF_MULTIPLES = 10**12
"""Bound of multiples of a fraction that have none: with it a double tells them from their neighbours."""
_FARTHEST = 10**18
"""Bound of numbers whose bounds are farther from zero."""
_SHORT_ESCAPES = "\b\t\n\f\r"


class UnkeptSchema(ValueError):
    """Part of a schema that cannot be kept to, with its keyword."""

    def __init__(self, where: str, keyword: str, reason: str) -> None:
        super().__init__(f"{where} is not supported: {keyword}: {reason}")
        self.where = where
        self.keyword = keyword


@dataclass(frozen=True, slots=True)
class _Whole:
    """The whole schema as it was given, the draft that it names, and definitions that are added to it."""

    schema: Mapping[str, Any]
    draft: str
    names: dict[str, str] = field(default_factory=dict)
    """Names of added definitions, by what they are definitions of."""
    added: dict[str, _Part] = field(default_factory=dict)

    @property
    def taken(self) -> set[str]:
        """Names of definitions."""
        given = self.schema.get("$defs")
        return {*(given if isinstance(given, Mapping) else ()), *self.names.values()}


def kept(schema: Mapping[str, Any]) -> _Part:
    """Return a schema for llguidance of which each answer satisfies `schema`. Raises `UnkeptSchema`."""
    written = schema.get("$schema")
    named = written.rstrip("#") if isinstance(written, str) else ""
    if _OLD_DRAFTS.search(named):
        raise UnkeptSchema("#", "$schema", "a draft before the fourth, whose keywords mean something else")
    # The author of a schema does not choose how it is compiled.
    whole = _Whole({key: value for key, value in schema.items() if key != "x-guidance"}, named)
    found = _kept("#", whole.schema, whole)
    if whole.added:
        found["$defs"] = {**found.get("$defs", {}), **whole.added}
    return found


def _kept(where: str, part: Mapping[str, Any], whole: _Whole) -> _Part:
    draft = whole.draft
    changed = {key: _below(f"{where}/{_pointer(key)}", key, value, whole) for key, value in part.items()}
    if "oneOf" in part:
        _replace_one_of(where, changed, part, whole)
    _require_draft(where, changed, draft)
    _require_distinct(where, changed)
    for keyword in [keyword for keyword in changed if says_nothing(keyword, changed)]:
        del changed[keyword]
    for keyword in ("const", "enum"):
        if keyword in changed and (reason := _unwritable(changed[keyword])) is not None:
            raise UnkeptSchema(where, keyword, reason)
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if keyword in changed:
            changed[keyword] = _bound(changed[keyword], upwards=keyword.lower().endswith("minimum"))
    _require_integers(where, changed)
    _bring_near(changed)
    _shut_out_ends(where, changed)
    _bound_multiples(where, changed)
    _translate_patterns(where, changed)
    _narrow_format(changed)
    return _ordered(changed)


def _below(where: str, key: str, value: Any, whole: _Whole) -> Any:
    """Return the value of a keyword, rewritten as far as there may be schemas in it: `$ref` may point to any place."""
    if key in _DATA:
        return value
    if isinstance(value, Mapping):
        if key not in _BY_NAME:
            return _kept(where, value, whole)
        return {
            name: _kept(f"{where}/{_pointer(name)}", each, whole) if isinstance(each, Mapping) else each
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [
            _kept(f"{where}/{number}", each, whole) if isinstance(each, Mapping) else each
            for number, each in enumerate(value)
        ]
    return value


def _replace_one_of(where: str, changed: _Part, part: Mapping[str, Any], whole: _Whole) -> None:
    found = narrowings(part, whole.schema)
    if found is None:
        return  # llguidance may know better, and refuses it otherwise
    schemas = []
    for number, (kept_schema, keywords) in enumerate(zip(changed.pop("oneOf"), found, strict=True)):
        schema = part["oneOf"][number]
        schemas.append(_narrowed(f"{where}/oneOf/{number}", schema, keywords, whole) if keywords else kept_schema)
    if "anyOf" in changed:
        every = changed.get("allOf")
        changed["allOf"] = [*(every if isinstance(every, list) else []), {"anyOf": schemas}]
    else:
        changed["anyOf"] = schemas


def _narrowed(where: str, schema: Any, keywords: Mapping[str, Any], whole: _Whole) -> _Part:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if reference is None:
        return _kept(where, narrowed(schema, keywords), whole)
    # In a definition of its own: it may refer to itself, and llguidance takes nothing beside such a reference.
    key = f"{reference} {json.dumps(keywords)}"
    if key not in whole.names:
        name = whole.names[key] = next(name for number in count() if (name := f"narrowed-{number}") not in whole.taken)
        (schema_there,) = target(reference, whole.schema)
        whole.added[name] = _narrowed(reference, schema_there, keywords, whole)
    return {**_kept(where, schema, whole), "$ref": f"#/$defs/{whole.names[key]}"}


def _require_draft(where: str, part: _Part, draft: str) -> None:
    # Some validators take a part's own draft for its keywords. The latest draft has those of all others, and keeping to
    # more of them than are asked for is no harm; with an id, references would mean something else, too.
    own = part.get("$schema")
    if where != "#" and isinstance(own, str):
        is_harmless = draft in ("", _LATEST) and "id" not in part and "$id" not in part
        if own.rstrip("#") != (draft or _LATEST) and (not is_harmless or _OLD_DRAFTS.search(own)):
            raise UnkeptSchema(where, "$schema", "another one than that of the whole schema")
        del part["$schema"]
    # In these drafts validators decode the text; later ones take both keywords for annotations.
    if _DRAFTS_OF_CONTENT.search(draft):
        for keyword in ("contentEncoding", "contentMediaType"):
            if isinstance(part.get(keyword), str):
                raise UnkeptSchema(where, keyword, "texts are not decoded; in draft 2019-09 and later it says nothing")


def _require_distinct(where: str, part: _Part) -> None:
    # Names that are not listed may come twice, which makes one property.
    least, required = part.get("minProperties"), part.get("required")
    if isinstance(least, (int, float)):
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        if least > len(names) + 1:
            raise UnkeptSchema(
                where, "minProperties", f"{least} with {len(names)} required properties: list all but one in required"
            )


def says_nothing(keyword: str, part: _Part) -> bool:
    """Whether a keyword that llguidance would refuse, or misread, allows anything."""
    value = part[keyword]
    match keyword:
        case "additionalItems":
            return not isinstance(part.get("items"), list)
        case "uniqueItems" | "not":
            return value is False
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return bool(value == {})
        case "propertyNames" | "unevaluatedItems" | "unevaluatedProperties":
            return bool(value is True or value == {})
        case "minContains" | "maxContains":
            return "contains" not in part
        case "then" | "else":
            return "if" not in part
        case "$dynamicAnchor" | "$recursiveAnchor":
            return True  # what refers to it is refused
        case "if":
            return "then" not in part and "else" not in part
    return False


def _unwritable(value: Any) -> str | None:
    """Return why a constant would be written as another one, or never."""
    for each in _leaves(value):
        if isinstance(each, str) and any(letter < " " and letter not in _SHORT_ESCAPES for letter in each):
            return "a text with a control character"
        if not _is_number(each):
            continue
        if any(number != each for number in _read(_double(each))):
            return f"{each} is not kept exactly in 64 bits"
        if _is_wide(each):
            return f"{each} is an integer of more than 64 bits"
    return None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_wide(number: float) -> bool:
    """Whether a number is an integer that llguidance, which counts in 64 bits, writes as another one."""
    return _double(number).is_integer() and not -(2**63) <= number < 2**63


_BEYOND: Mapping[str, Callable[[float], bool]] = {
    "minimum": lambda bound: bound >= 2**63,
    "exclusiveMinimum": lambda bound: bound >= 2**63 - 1,
    "maximum": lambda bound: bound < -(2**63),
    "exclusiveMaximum": lambda bound: bound <= -(2**63),
}
"""Whether no integer of 64 bits is within a bound, by its keyword."""


def _require_integers(where: str, part: _Part) -> None:
    # The nearest integer that there is would be written.
    for keyword, is_beyond in _BEYOND.items():
        if _is_number(bound := part.get(keyword)) and is_beyond(bound):
            raise UnkeptSchema(where, keyword, f"{bound} is beyond the integers of 64 bits")


def _bring_near(part: _Part) -> None:
    # Farther bounds, such as those of 64 bits, are refused by llguidance. Answers within nearer ones are within both.
    lows, highs = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    for names, opposite, sign in ((lows, highs, -1), (highs, lows, 1)):
        if any(_is_number(bound := part.get(name)) and sign * bound >= _FARTHEST for name in opposite):
            continue
        for name in names:
            if _is_number(bound := part.get(name)) and sign * bound > _FARTHEST:
                part[name] = sign * _FARTHEST


def _shut_out_ends(where: str, part: _Part) -> None:
    # An end that is an integer would be let in where no other integer is between it and the other end.
    low, high = _exclusive(part, "minimum"), _exclusive(part, "maximum")
    least, most = part.get("minimum", low), part.get("maximum", high)
    if not _is_number(least) or not _is_number(most) or not 0 < most - least < 1:
        return
    # A billionth of what is between them, as a short decimal.
    away = 10.0 ** math.floor(math.log10((most - least) / 1e9))
    for name, end, inner in (("minimum", low, least + away), ("maximum", high, most - away)):
        if not _is_number(end) or not _double(end).is_integer():
            continue
        keyword = f"exclusive{name.capitalize()}"
        if inner == end:
            raise UnkeptSchema(where, keyword, f"{end} cannot be told from its neighbours in 64 bits")
        del part[keyword]
        part[name] = inner


def _exclusive(part: _Part, name: str) -> Any:
    """Return the bound `name` of a part if it is itself shut out, in any draft; else None."""
    found = part.get(f"exclusive{name.capitalize()}")
    if isinstance(found, bool):
        return part.get(name) if found else None
    return found


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _read(double: float) -> tuple[float, ...]:
    """Return what readers may find where llguidance has written a number that it keeps as `double`."""
    return (int(double), int(Decimal(repr(double)))) if double.is_integer() else (double,)


def _double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.copysign(math.inf, number)


def _bound(value: Any, *, upwards: bool) -> Any:
    """Return the nearest bound within `value` that a double has exactly."""
    if not _is_number(value):
        return value
    double, away = _double(value), math.inf if upwards else -math.inf
    if math.isinf(double):
        return value  # llguidance refuses it
    while any(number < value if upwards else number > value for number in _read(double)):
        double = math.nextafter(double, away)
    return value if double == value else double


def _bound_multiples(where: str, part: _Part) -> None:
    # As long as llguidance writes them, multiples are none any more once they are read as doubles; integers are exact.
    of, kinds = part.get("multipleOf"), part.get("type", _TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not _is_number(of) or not isinstance(kinds, list) or "number" not in kinds:
        return
    if Decimal(repr(of)) != Decimal(of):
        raise UnkeptSchema(
            where,
            "multipleOf",
            f"{of} has no exact double, so that validators reject some of its multiples (of 0.01 they reject 1.14): "
            "ask for integers of a smaller unit, or for texts with a pattern",
        )
    if of == int(of):
        integers = [kind for kind in kinds if kind != "number"]
        part["type"] = integers if "integer" in integers else [*integers, "integer"]
    else:
        if not {"minimum", "exclusiveMinimum"} & part.keys():
            part["minimum"] = -_MOST_OF_MULTIPLES
        if not {"maximum", "exclusiveMaximum"} & part.keys():
            part["maximum"] = _MOST_OF_MULTIPLES


def _translate_patterns(where: str, part: _Part) -> None:
    keyword = "pattern"
    try:
        if isinstance(part.get(keyword), str):
            part[keyword] = in_rust(part[keyword])
        keyword = "patternProperties"
        if isinstance(named := part.get(keyword), Mapping):
            part[keyword] = {in_rust(name, exact=True): each for name, each in named.items()}
            if len(part[keyword]) < len(named):
                raise ValueError("two patterns are the same")
    except ValueError as error:
        raise UnkeptSchema(where, keyword, str(error)) from error


def _narrow_format(part: _Part) -> None:
    format_name = part.get("format")
    narrower = NARROWER.get(format_name, ()) if isinstance(format_name, str) else ()
    if narrower:
        texts = [pattern for pattern in (part.get("pattern"), *narrower) if isinstance(pattern, str)]
        part["pattern"], *others = texts
        kinds = {"type": part["type"]} if "type" in part else {}
        if others:
            found = part.get("allOf")
            more = [{**kinds, "pattern": pattern} for pattern in others]
            part["allOf"] = [*found, *more] if isinstance(found, list) else more


def _ordered(part: _Part) -> _Part:
    """Return `part` with each follower right behind what it belongs to.

    llguidance cuts a schema at `allOf` and the like, and reads the pieces one by one.
    """
    found: _Part = {}
    behind = {follower for leader, follower in _FOLLOWERS.items() if leader in part and follower in part}
    for key, value in part.items():
        if key in behind:
            continue
        found[key] = value
        if (follower := _FOLLOWERS.get(key)) in behind:
            found[follower] = part[follower]
    return found


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
