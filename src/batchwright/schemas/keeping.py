"""Rewriting of schemas so that llguidance enforces what it would silently relax; what it cannot enforce is refused.

llguidance refuses the keywords that it does not know. The rules here are for keywords that it knows but interprets
differently from validators; each rule states its reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from itertools import count
from typing import Any, TypeAlias, TypeGuard

from batchwright.schemas.formats import NARROWER
from batchwright.schemas.one_of import Option, narrowed, options, target
from batchwright.schemas.patterns import in_rust

_Part: TypeAlias = dict[str, Any]

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map names of the author's choice to schemas."""
_DATA = ("const", "enum", "default", "examples", "example", "required", "type", "dependentRequired")
"""Keywords whose values are not schemas, whatever they look like."""
_FOLLOWERS = {
    "items": "additionalItems",
    "patternProperties": "additionalProperties",
    "minimum": "exclusiveMinimum",
    "maximum": "exclusiveMaximum",
}
"""Keywords that have a meaning only beside another one, keyed by that one."""
_LATEST = "https://json-schema.org/draft/2020-12/schema"
"""The draft of a schema that names none."""
_OLD_DRAFTS = re.compile(r"json-schema\.org/draft-0[0-3]/")
_DRAFTS_OF_CONTENT = re.compile(r"json-schema\.org/draft-0[67]/")
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
_MOST_OF_MULTIPLES = 10**12
"""Bound for unbounded multiples of a fraction: within it, a double distinguishes them from their neighbours."""
_FARTHEST = 10**18
"""Bound that replaces bounds farther from zero."""
_SHORT_ESCAPES = "\b\t\n\f\r"


class UnkeptSchema(ValueError):
    """A part of a schema that cannot be enforced, with its keyword."""

    def __init__(self, where: str, keyword: str, reason: str) -> None:
        super().__init__(f"{where} is not supported: {keyword}: {reason}")
        self.where = where
        self.keyword = keyword


class _Whole:
    """The whole schema as it was given, its draft, and narrowed definitions that are added to it."""

    def __init__(self, schema: Mapping[str, Any], draft: str, *, may_narrow: bool) -> None:
        self.schema = schema
        self.draft = draft
        self.may_narrow = may_narrow
        """Whether a `oneOf` may be replaced by something narrower."""
        self.is_narrowed = False
        self.has_one_of = self.has_one_of_left = False
        self.other_draft_at: str | None = None
        """Where a part names another draft; None if none does."""
        references, has_ids = _references(schema)
        self.may_replace = not any("oneOf" in reference.split("/") for reference in references)
        """Whether no reference goes through a `oneOf`."""
        self.followed = {} if has_ids else schema
        """Where references lead; nowhere if they may be relative to a part of the schema."""
        given = schema.get("$defs")
        self._numbers = (number for number in count() if not isinstance(given, Mapping) or _name(number) not in given)
        self._names: dict[tuple[str, str], str] = {}
        self._waiting: list[tuple[str, str, Mapping[str, Any]]] = []

    def narrowed(self, reference: str, keywords: Mapping[str, Any]) -> str:
        """Return a reference to a narrowed definition of what `reference` points to."""
        key = reference, json.dumps(keywords)
        if key not in self._names:
            self._names[key] = _name(next(self._numbers))
            self._waiting.append((self._names[key], reference, keywords))
        return f"#/$defs/{self._names[key]}"

    def definitions(self) -> _Part:
        """Return the definitions that were asked for, and those that they ask for in turn."""
        found: _Part = {}
        while self._waiting:
            name, reference, keywords = self._waiting.pop()
            (schema,) = target(reference, self.schema)
            found[name] = _kept_option(reference, Option("", schema, keywords), self)
        return found


def _name(number: int) -> str:
    return f"narrowed-{number}"


def _references(schema: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return all references in a schema, and whether a part of it has an id, to which they may be relative.

    Names of properties are not keywords, nor is anything in constants that looks like one.
    """
    references, has_ids = list[str](), False
    waiting: list[tuple[Any, bool]] = [(schema, False)]
    while waiting:
        value, has_names = waiting.pop()
        if isinstance(value, list):
            waiting += [(each, False) for each in value]
        elif isinstance(value, Mapping) and has_names:
            waiting += [(each, False) for each in value.values()]
        elif isinstance(value, Mapping):
            references += [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            is_part = value is not schema
            has_ids |= is_part and any(isinstance(value.get(name), str) for name in ("$id", "id"))
            waiting += [(each, key in _BY_NAME) for key, each in value.items() if key not in _DATA]
    return references, has_ids


def kept(schema: Mapping[str, Any]) -> _Part:
    """Return a schema for llguidance whose every answer satisfies `schema`. Raises `UnkeptSchema`."""
    written = schema.get("$schema")
    named = written.rstrip("#") if isinstance(written, str) else ""
    if _OLD_DRAFTS.search(named):
        raise UnkeptSchema("#", "$schema", "a draft before the fourth, whose keywords mean something else")
    # The author of a schema does not choose how it is compiled.
    given = {key: value for key, value in schema.items() if key != "x-guidance"}
    whole = _Whole(given, named, may_narrow=True)
    found = _whole_kept(whole)
    if whole.is_narrowed and whole.has_one_of_left:
        # Narrowing one of the schemas of a `oneOf` can widen the `oneOf` as a whole. The same holds within `not` and
        # `if`, but those are refused.
        whole = _Whole(given, named, may_narrow=False)
        found = _whole_kept(whole)
    if whole.other_draft_at is not None and whole.has_one_of:
        # What allows more in one draft than in another may leave less to the schemas beside it.
        raise UnkeptSchema(
            whole.other_draft_at, "$schema", "another one than that of the whole schema, which has a oneOf"
        )
    return found


def _whole_kept(whole: _Whole) -> _Part:
    found = _kept("#", whole.schema, whole)
    if added := whole.definitions():
        found["$defs"] = {**found.get("$defs", {}), **added}
    return found


def _kept(where: str, part: Mapping[str, Any], whole: _Whole) -> _Part:
    draft = whole.draft
    changed = _rewritten_within(where, part, whole)
    if where != "#" and isinstance(own := part.get("$schema"), str) and own.rstrip("#") != (draft or _LATEST):
        whole.other_draft_at = where
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


def _chosen(part: Mapping[str, Any], whole: _Whole) -> list[Option] | None:
    """Return what replaces the `oneOf` of a part; None if it has to be left as it is."""
    found = options(part, whole.followed, whole.draft, may_narrow=whole.may_narrow) if whole.may_replace else None
    whole.has_one_of = True
    whole.has_one_of_left |= found is None
    return found


def _rewritten_within(where: str, part: Mapping[str, Any], whole: _Whole) -> _Part:
    """Return a part with its schemas rewritten, and `oneOf` replaced by `anyOf` where that allows the same or less."""
    chosen = _chosen(part, whole) if "oneOf" in part else None
    changed = {
        key: _below(f"{where}/{_pointer(key)}", key, value, whole)
        for key, value in part.items()
        if chosen is None or key != "oneOf"
    }
    if chosen is not None:
        whole.is_narrowed |= any(option.keywords for option in chosen)
        schemas = {"anyOf": [_kept_option(f"{where}/{option.where}", option, whole) for option in chosen]}
        if "anyOf" in changed:
            every = changed.get("allOf")
            schemas = {"allOf": [*(every if isinstance(every, list) else []), schemas]}
        changed |= schemas
    return changed


def _below(where: str, key: str, value: Any, whole: _Whole) -> Any:
    """Return the value of a keyword, rewritten wherever it may have schemas, since `$ref` may point anywhere."""
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


def _kept_option(where: str, option: Option, whole: _Whole) -> Any:
    if not isinstance(option.schema, Mapping):
        return option.schema
    if not option.keywords:
        return _kept(where, option.schema, whole)
    if "$ref" not in option.schema:
        return _kept(where, narrowed(option.schema, option.keywords), whole)
    # It gets its own definition: it may refer to itself, and llguidance accepts nothing beside such a reference.
    return {**_kept(where, option.schema, whole), "$ref": whole.narrowed(option.schema["$ref"], option.keywords)}


def _require_draft(where: str, part: _Part, draft: str) -> None:
    # Some validators read a part's keywords by its own draft. The latest draft has those of all others, and enforcing
    # more of them than required does no harm; with an id, references would also mean something else.
    own = part.get("$schema")
    if where != "#" and isinstance(own, str):
        is_harmless = draft in ("", _LATEST) and "id" not in part and "$id" not in part
        if own.rstrip("#") != (draft or _LATEST) and (not is_harmless or _OLD_DRAFTS.search(own)):
            raise UnkeptSchema(where, "$schema", "another one than that of the whole schema")
        del part["$schema"]
    # In these drafts, validators decode the text; later drafts treat both keywords as annotations.
    if _DRAFTS_OF_CONTENT.search(draft):
        for keyword in ("contentEncoding", "contentMediaType"):
            if isinstance(part.get(keyword), str):
                raise UnkeptSchema(where, keyword, "texts are not decoded; in draft 2019-09 and later it says nothing")


def _require_distinct(where: str, part: _Part) -> None:
    # Names that are not listed may be repeated, and repetitions count as one property.
    least, required = part.get("minProperties"), part.get("required")
    if isinstance(least, (int, float)):
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        if least > len(names) + 1:
            raise UnkeptSchema(
                where, "minProperties", f"{least} with {len(names)} required properties: list all but one in required"
            )


def says_nothing(keyword: str, part: Mapping[str, Any]) -> bool:
    """Return whether a keyword that llguidance would refuse or misread restricts nothing."""
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
        case "default" | "discriminator":
            return True  # beside a reference, they would prevent it from being circular
        case "$dynamicAnchor" | "$recursiveAnchor":
            return True  # what refers to it is refused
        case "if":
            return "then" not in part and "else" not in part
    return False


def _unwritable(value: Any) -> str | None:
    """Return why a constant would be written differently, or not at all."""
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
    """Return whether a number is an integer that llguidance, which uses 64 bits, writes as another one."""
    return _double(number).is_integer() and not -(2**63) <= number < 2**63


_BEYOND: Mapping[str, Callable[[float], bool]] = {
    "minimum": lambda bound: bound >= 2**63,
    "exclusiveMinimum": lambda bound: bound >= 2**63 - 1,
    "maximum": lambda bound: bound < -(2**63),
    "exclusiveMaximum": lambda bound: bound <= -(2**63),
}
"""Tests, by the keyword of a bound, of whether no 64-bit integer is within it."""


def _require_integers(where: str, part: _Part) -> None:
    # The nearest 64-bit integer would be written.
    for keyword, is_beyond in _BEYOND.items():
        if _is_number(bound := part.get(keyword)) and is_beyond(bound):
            raise UnkeptSchema(where, keyword, f"{bound} is beyond the integers of 64 bits")


def _bring_near(part: _Part) -> None:
    # llguidance refuses farther bounds, such as those of 64 bits. Answers within nearer ones are within both.
    lows, highs = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    for names, opposite, sign in ((lows, highs, -1), (highs, lows, 1)):
        if any(_is_number(bound := part.get(name)) and sign * bound >= _FARTHEST for name in opposite):
            continue
        for name in names:
            if _is_number(bound := part.get(name)) and sign * bound > _FARTHEST:
                part[name] = sign * _FARTHEST


def _shut_out_ends(where: str, part: _Part) -> None:
    # An excluded end that is an integer would be allowed if no other integer is between it and the other end.
    low, high = _exclusive(part, "minimum"), _exclusive(part, "maximum")
    least, most = part.get("minimum", low), part.get("maximum", high)
    if not _is_number(least) or not _is_number(most) or not 0 < most - least < 1:
        return
    # A billionth of the distance between them, as a short decimal.
    away = 10.0 ** math.floor(math.log10((most - least) / 1e9))
    for name, end, inner in (("minimum", low, least + away), ("maximum", high, most - away)):
        if not _is_number(end) or not _double(end).is_integer():
            continue
        keyword = f"exclusive{name.capitalize()}"
        if inner == end:
            raise UnkeptSchema(where, keyword, f"{end} cannot be distinguished from its neighbours in 64 bits")
        del part[keyword]
        part[name] = inner


def _exclusive(part: _Part, name: str) -> Any:
    """Return the bound `name` of a part if it is exclusive, in any draft; else None."""
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
    """Return what parsers may read where llguidance has written a number that it stores as `double`."""
    return (int(double), int(Decimal(repr(double)))) if double.is_integer() else (double,)


def _double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _bound(value: Any, *, upwards: bool) -> Any:
    """Return the nearest bound within `value` that a double represents exactly."""
    if not _is_number(value):
        return value
    double, away = _double(value), math.inf if upwards else -math.inf
    if math.isinf(double):
        return value  # llguidance refuses it
    while any(number < value if upwards else number > value for number in _read(double)):
        double = math.nextafter(double, away)
    return value if double == value else double


def _bound_multiples(where: str, part: _Part) -> None:
    # With as many digits as llguidance writes, multiples are no longer multiples once read as doubles; integers are
    # exact.
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
    """Return `part` with each follower right after the keyword that it belongs to.

    llguidance splits a schema at `allOf` and similar keywords, and reads the pieces one by one.
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
