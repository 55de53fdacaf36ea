"""What llguidance would silently relax in schemas is kept, or refused with its keyword and place."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright import InvalidRequest
from batchwright.constraints import Constraint
from batchwright.engine.grammars import Grammars, refusal_of
from batchwright.engine.tokenizer import Tokenizer
from batchwright.schemas import kept
from batchwright.schemas.patterns import in_rust

from .structured import byte_tokenizer

_DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
_DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
_ONE_MORE = 2**53 + 1
"""A number that a double has not."""

Possible = Callable[[Any, str], bool]


def _tagged(tag: str, name: str) -> dict[str, Any]:
    """A schema of objects with a tag that has a default, as pydantic writes it."""
    properties = {"kind": {"const": tag, "default": tag, "type": "string"}, name: {"type": "integer"}}
    return {"type": "object", "properties": properties}


@pytest.fixture(scope="module")
def possible(tmp_path_factory: pytest.TempPathFactory) -> Possible:
    """Whether a text is an answer that a schema allows."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(folder)
    tokenizer = Tokenizer(folder, 311)
    grammars = Grammars(tokenizer, 311)

    def ask(schema: Any, text: str) -> bool:
        matcher = grammars.matcher(Constraint("schema", json.dumps(schema)))
        tokens = tokenizer.encode(text)
        return (
            matcher.allowed(tokens) == len(tokens)
            and matcher.inner.consume_tokens(tokens)
            and (matcher.inner.is_accepting())
        )

    return ask


def accepts(schema: Any, value: Any) -> bool:
    """Whether a validator accepts a value, or cannot read the schema."""
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value)
    except jsonschema_rs.ValidationError:  # a pattern that is none with ECMAScript's flag u
        return True


KEPT: list[tuple[Any, list[str], list[str]]] = [
    # A name that is spelt in another way is the same property.
    ({"properties": {"a": {"type": "integer"}}}, ['{"a":1}', '{"b":"x"}'], [r'{"\u0061":"x"}']),
    ({"patternProperties": {"^a": {"type": "integer"}}}, ['{"ab":1}', '{"b":"x"}'], [r'{"\u0061":"x"}']),
    ({"properties": {"a\nb": {"type": "integer"}}}, [r'{"a\nb":1}'], [r'{"a\u000ab":"x"}']),
    # A keyword that belongs to another one, with a keyword between them at which llguidance cuts.
    (_DRAFT_4 | {"items": [{"type": "integer"}], "allOf": [{}], "additionalItems": False}, ["[1]", "3"], ["[1,2]"]),
    (_DRAFT_4 | {"exclusiveMinimum": True, "allOf": [{}], "minimum": 3}, ["4"], ["3"]),
    (_DRAFT_4 | {"exclusiveMaximum": True, "enum": [2, 3], "maximum": 3}, ["2"], ["3"]),
    # One that says nothing where it is, and hides another.
    ({"prefixItems": [{"type": "string"}], "additionalItems": False}, ['["a"]', '["a",1]'], ["[1]"]),
    ({"uniqueItems": False, "not": False, "dependencies": {}, "then": False, "minContains": 2}, ["[1,1]"], []),
    ({"items": {"unevaluatedItems": True, "propertyNames": {}, "if": {}}}, ["[[]]"], []),
    # Bounds that a double has not; what is between them and it is not said.
    ({"type": "integer", "minimum": _ONE_MORE}, [f"{2**53 + 2}"], [f"{2**53}"]),
    ({"type": "integer", "exclusiveMaximum": 2**53 + 3}, [f"{2**53}"], [f"{2**53 + 3}", f"{2**53 + 4}"]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["7"], [f"{2**64}"]),
    # Multiples that are still some when they are read as doubles.
    ({"type": "number", "multipleOf": 1.5}, ["-4.5", "3"], ["92000702213708924704871339547.0", "4"]),
    ({"multipleOf": 3}, ["9", f"{3 * 10**30}", '"a"'], ["9.0", "10"]),
    ({"type": ["integer", "number"], "multipleOf": 2, "minimum": 3}, ["4"], ["2", "5"]),
    # Bounds of integers of 64 bits, and of doubles.
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-7", f"{10**18}"], [f"{2**63}"]),
    ({"type": "number", "minimum": 0, "maximum": 1e300}, ["7.5", f"{10**18}"], ["-1"]),
    ({"type": "number", "exclusiveMinimum": -1e300}, ["7.5", f"-{10**17}"], []),
    # An end that is no answer, where no other integer is between the ends.
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "type": "number"}, ["0.4", "0.000001"], ["0", "0.0", "0.5"]),
    ({"exclusiveMinimum": 3, "maximum": 3.5, "type": "number"}, ["3.5", "3.000001"], ["3", "3.0", "4"]),
    ({"exclusiveMaximum": 0, "minimum": -0.5, "type": "number"}, ["-0.5", "-0.000001"], ["0", "-0", "-0.0"]),
    (_DRAFT_4 | {"exclusiveMinimum": True, "minimum": 3, "maximum": 3.5, "type": "number"}, ["3.5"], ["3", "3.0"]),
    ({"exclusiveMinimum": 0, "maximum": 1e-7, "type": "number"}, ["0.0000001", "0.00000001"], ["0", "0.1"]),
    ({"exclusiveMinimum": 0, "maximum": 1, "type": "number"}, ["0.0000000000001", "1"], ["0", "0.0"]),
    # What all validators take for a character of a class.
    ({"type": "string", "pattern": r"^\s$"}, ['" "', '"\u3000"'], ['"\x85"', '"\ufeff"']),
    ({"type": "string", "pattern": r"^[^\s]$"}, ['"a"'], ['"\x85"', '"\ufeff"', '" "']),
    ({"type": "string", "pattern": r"^[\s\S]$"}, ['"a"', '" "', '"\x85"'], ['"ab"']),
    ({"type": "string", "pattern": "^.$"}, ['"a"', '"é"'], [r'"\r"', '"\u2028"', r'"\n"']),
    ({"type": "string", "pattern": r"^\W[^\w]$"}, ['"-+"'], ['"é-"', '"-é"', '"a-"']),
    ({"type": "string", "pattern": r"^\d[\d-x]$"}, ['"17"', '"1-"', '"1x"'], ['"1y"', '"٣1"']),
    ({"type": "string", "pattern": "^[[a]b]$"}, ['"[b]"', '"ab]"'], ['"b"']),
    ({"type": "string", "pattern": "^[a&&b~~]$"}, ['"&"', '"b"', '"~"'], ['"c"']),
    ({"type": "string", "pattern": r"^[\b\]]\<$"}, [r'"\b<"', '"]<"'], ['"b<"']),
    ({"type": "string", "pattern": "^a|b$"}, ['"ac"', '"cb"'], ['"ca"']),
    # Formats as validators check them.
    ({"type": "string", "format": "date"}, ['"2000-02-29"'], ['"1900-02-29"', '"0000-01-01"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T12:00:59Z"'], ['"2024-02-28T12:00:60Z"']),
    ({"type": ["string", "null"], "format": "time", "pattern": "^1"}, ['"12:00:59Z"', "null"], ['"12:00:60Z"']),
    ({"type": "string", "format": "hostname"}, ['"a-b.c"', '"a--b"'], ['"ab--c"', '"xn--a"']),
    ({"type": "string", "format": "email", "allOf": [{"maxLength": 9}]}, ['"a@b.c"'], ['"a@xn--a"', '"a@bbbbbbb.c"']),
    # Whoever writes a schema does not say how it is compiled.
    ({"x-guidance": {"whitespace_pattern": " "}, "type": "array"}, ["[]"], ["[ ]"]),
    # A part is kept wherever a reference finds it.
    ({"$ref": "#/x/y/z", "x": {"y": {"z": {"type": "string", "pattern": r"^\s$"}}}}, ['" "'], ['"\x85"']),
    # One of several schemas, also if only a tag, the type around them, or what they require tells them apart.
    ({"type": ["string", "null"], "oneOf": [{"const": "a", "title": "A"}, {"type": "null"}]}, ['"a"', "null"], ['"b"']),
    ({"oneOf": [_tagged("a", "x"), _tagged("b", "y")]}, ['{"kind":"a","x":1}', '{"kind":"b"}'], ['{"x":1}', "3"]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1,"c":2}'],
        ['{"a":1,"b":1}', "{}"],
    ),
    ({"oneOf": [{"type": "null"}, {"type": "array"}], "anyOf": [{"maxItems": 1}]}, ["null", "[1]"], ["3", "[1,2]"]),
    (
        {"$ref": "#/$defs/node",
         "$defs": {"node": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/pair"}],
                            "discriminator": {"propertyName": "kind"}, "default": {}},
                   "leaf": _tagged("leaf", "value"),
                   "pair": {**_tagged("pair", "size"), "additionalProperties": {"$ref": "#/$defs/node"}}}},
        ['{"kind":"pair","left":{"kind":"leaf","value":1},"right":{"kind":"pair"}}'],
        ['{"kind":"pair","left":{"value":1}}', '{"kind":"pair","left":3}'],
    ),
    (
        {"oneOf": [{"oneOf": [_tagged("a", "x"), _tagged("b", "y")], "title": "ab"}, _tagged("c", "x")]},
        ['{"kind":"b","y":1}', '{"kind":"c","x":1}'],
        ['{"x":1}', '{"kind":"c","x":"a"}'],
    ),
    ({"$id": "http://a/b", "type": "object", "properties": {"kind": {"const": 1}, "in": {"oneOf": [{"$ref": "#"},
      _tagged("a", "x")]}}}, ['{"in":{"kind":1,"in":{"kind":"a"}}}'], ['{"in":{}}']),
    ({"oneOf": [{"type": "object", "properties": {"c": {"$ref": "#/oneOf/1"}}}, {"type": "null"}]}, ["null"], ["1"]),
    # A part's own draft, if it is the same, and constants, whatever they look like.
    (_DRAFT_7 | {"items": {"$schema": "http://json-schema.org/draft-07/schema", "type": "null"}}, ["[null]"], ["[1]"]),
    ({"items": _DRAFT_4 | {"exclusiveMinimum": True, "minimum": 3, "const": 4}}, ["[4]"], ["[3]", "[5]"]),
    ({"const": {"pattern": r"\s", "not": False}}, [r'{"pattern":"\\s","not":false}'], [r'{"pattern":"\\s"}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), KEPT, ids=lambda value: json.dumps(value)[:60])
def test_what_a_schema_says_is_kept(possible: Possible, schema: Any, allowed: list[str], forbidden: list[str]) -> None:
    for text in allowed:
        assert possible(schema, text), text
        assert accepts(schema, json.loads(text)), text
    for text in forbidden:
        assert not possible(schema, text), text


REFUSED: list[tuple[Any, str]] = [
    ({"type": "object", "minProperties": 2}, "# is not supported: minProperties"),
    ({"items": {"minProperties": 3, "required": ["a", "a"]}}, "#/items is not supported: minProperties"),
    ({"properties": {"a/b": {"const": _ONE_MORE}}}, "#/properties/a~1b is not supported: const"),
    ({"enum": [1, [1e300]]}, "# is not supported: enum"),
    ({"type": "integer", "enum": [1, 1e22]}, "# is not supported: enum: 1e+22 is an integer of more than 64 bits"),
    ({"items": {"type": "integer", "minimum": 2**63, "maximum": 1e20}}, "#/items is not supported: minimum"),
    ({"type": "integer", "exclusiveMaximum": -(2**63)}, "# is not supported: exclusiveMaximum"),
    ({"properties": {"price": {"multipleOf": 0.01}}}, "#/properties/price is not supported: multipleOf: 0.01 has no"),
    ({"const": {"a": "\x01"}}, "# is not supported: const: a text with a control character"),
    ({"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "string"}, "# is not supported: $schema"),
    (_DRAFT_7 | {"items": _DRAFT_4 | {"if": {}}}, "#/items is not supported: $schema"),
    ({"items": _DRAFT_4 | {"id": "a", "type": "null"}}, "#/items is not supported: $schema"),
    (_DRAFT_7 | {"contentEncoding": "base64"}, "# is not supported: contentEncoding"),
    ({"type": "string", "pattern": "^[]a]$"}, "# is not supported: pattern"),
    ({"type": "string", "pattern": "[+--]"}, "# is not supported: pattern"),
    ({"patternProperties": {"\\d": {}, "[0-9]": {"const": 1}}}, "# is not supported: patternProperties"),
    ({"patternProperties": {"a[": {}}}, "# is not supported: patternProperties"),
    ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]}, "# is not supported: oneOf: its schemas cannot"),
    # A property that must be there to tell two schemas apart would be missing from what a third one allows.
    ({"oneOf": [{"oneOf": [_tagged("a", "x"), {"properties": {"kind": {"const": 2}}}]}, {"type": "string"}]}, "oneOf"),
    (_DRAFT_4 | {"oneOf": [{"const": 1}, {"const": 2}]}, "# is not supported: oneOf"),
    ({"oneOf": [{"const": 1}, _DRAFT_4 | {"const": 2}]}, "#/oneOf/1 is not supported: $schema"),
    ({"oneOf": [{"type": [["x"]]}, {"type": "null"}]}, "is not supported"),
    ({"prefixItems": [{"uniqueItems": False}, {"uniqueItems": True}]}, "#/prefixItems/1 has keywords"),
    (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"], "properties": {"b": {"not": {}}}}]},
        '#/oneOf/1/properties/b has keywords that are not supported: ["not"]',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "told"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_cannot_be_kept_is_refused(possible: Possible, schema: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        possible(schema, "null")
    assert told in str(refusal.value)


def test_a_schema_of_what_cannot_be_written_is_refused(possible: Possible) -> None:
    with pytest.raises(InvalidRequest, match="schema: there is no text that it allows"):
        possible({"type": "string", "pattern": "^a[\\x00-\\x07]b$"}, '"a')


def test_a_schema_that_needs_nothing_is_as_it_was() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"uniqueItems": {"type": "integer", "minimum": -1.5, "exclusiveMaximum": 2**53}, "const": {}},
        "required": ["uniqueItems"],
        "additionalProperties": False,
        "minProperties": 2,
        "allOf": [{"enum": [{"not": False}, 0.1, 2**53, -(2**53)]}],
    }
    assert json.dumps(kept(schema)) == json.dumps(schema)


_PIECES = st.sampled_from(
    ["a", "b", "é", "\\d", "\\D", "\\w", "\\W", "\\s", "\\S", ".", "\\.", "[ab]", "[^a]", "[\\s-]", "[^\\W]",
     "[\\d\\D]", "[^\\d_]", "[[&]", "\\-", "a|b", "(?:a|\\s)", "a?", ".*", "\\w+", "x{1,2}", "\\u0061", "^", "$"]
)  # fmt: skip


@given(
    st.lists(_PIECES, min_size=1, max_size=4).map("".join),
    st.text(st.sampled_from("ab1é٣²_-[& \n\r\x85\x1c\ufeff\u2028x"), max_size=5),
)
def test_what_a_pattern_takes_every_validator_takes(possible: Possible, pattern: str, text: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    try:
        is_possible = possible(schema, json.dumps(text, ensure_ascii=False))
    except InvalidRequest:
        return
    if is_possible:
        assert re.search(pattern, text)
        assert accepts(schema, text)


@given(st.text(st.sampled_from(r"[]^-\&~abdDsSwWbB.<>(){}|*+?$"), max_size=12))
def test_any_text_is_translated_or_refused(pattern: str) -> None:
    for exact in (False, True):
        with contextlib.suppress(ValueError):
            assert in_rust(pattern, exact=exact) or not pattern


_SAYING: dict[str, Any] = {
    "$anchor": "a", "$comment": "", "$defs": {"a": {}}, "$dynamicAnchor": "a", "$dynamicRef": "#a", "$id": "http://a/b",
    "$recursiveRef": "#", "$recursiveAnchor": True, "$ref": "#/$defs/a", "additionalItems": False,
    "additionalProperties": False, "allOf": [{"type": "null"}], "anyOf": [{"type": "null"}], "const": 1,
    "contains": {"type": "null"}, "default": 1,
    "definitions": {"a": {}}, "dependencies": {"a": ["b"]}, "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}}, "deprecated": True, "description": "", "enum": [1], "examples": [1],
    "exclusiveMaximum": 2, "exclusiveMinimum": 1, "format": "date", "if": {"type": "null"}, "items": {"type": "null"},
    "maxItems": 1, "maxLength": 1, "maxProperties": 1, "maximum": 1, "minItems": 1, "minLength": 1, "minProperties": 1,
    "minimum": 1, "multipleOf": 2, "not": {"type": "null"}, "oneOf": [{"type": "null"}], "pattern": "a",
    "patternProperties": {"a": {}}, "prefixItems": [{"type": "null"}], "properties": {"a": {}},
    "propertyNames": {"maxLength": 1}, "readOnly": True, "required": ["a"], "title": "", "type": "null",
    "unevaluatedItems": False, "unevaluatedProperties": False, "uniqueItems": True, "writeOnly": True,
}  # fmt: skip
"""Keywords of all drafts, each with a value that says something."""
_FORMATS = [
    "color", "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri",
    "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference", "uri-template",
    "uuid",
]  # fmt: skip


def test_the_documents_list_what_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    # The latest draft, and the last one with $recursiveRef; "then" makes "if" say something.
    around: list[dict[str, Any]] = [
        {"then": False, "$defs": {"a": {}}},
        {"$schema": "https://json-schema.org/draft/2019-09/schema"},
    ]
    keywords = {
        keyword
        for keyword, value in _SAYING.items()
        if _refusal(around[0] | {keyword: value}) or _refusal(around[0] | around[1] | {keyword: value})
    }
    assert keywords == _listed(text, "- Refused keywords:", ";")
    formats = {name for name in _FORMATS if not _refusal({"type": "string", "format": name})}
    assert formats == _listed(text, "- Kept formats:", ";")


def _refusal(schema: Any) -> str | None:
    return refusal_of(Constraint("schema", json.dumps(schema)))


def _listed(text: str, after: str, until: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text.partition(after)[2].partition(until)[0]))
