"""`oneOf` is replaced only where no answer satisfies two of its schemas."""

from __future__ import annotations

from itertools import product
from typing import Any

import jsonschema_rs
from hypothesis import given
from hypothesis import strategies as st

from batchwright.schemas import UnkeptSchema, kept

_ABSENT = object()
_SCALARS = [None, True, 0, 1, 1.5, "x", "y"]
_NAMES = ("a", "b", "c")
_OBJECTS = [
    {name: value for name, value in zip(_NAMES, values, strict=True) if value is not _ABSENT}
    for values in product([_ABSENT, 0, 1, "x"], repeat=len(_NAMES))
]
_VALUES: list[Any] = [*_SCALARS, [], [1], *_OBJECTS, {"d": 1}]

_TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "object"])
_LEAVES = st.one_of(
    st.builds(lambda value: {"const": value}, st.sampled_from(_SCALARS)),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.sampled_from(_SCALARS), min_size=1, max_size=2, unique=True)
    ),
    st.builds(lambda name: {"type": name}, _TYPES),
    st.sampled_from([{}, {"$ref": "#/$defs/one"}, {"$ref": "#/$defs/x"}, False]),
)
_PARTS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "type": _TYPES | st.just(["object", "null"]) | st.just("object"),
        "properties": st.dictionaries(st.sampled_from(_NAMES), _LEAVES, max_size=2),
        "required": st.lists(st.sampled_from(_NAMES), max_size=2, unique=True),
        "additionalProperties": st.booleans(),
        "allOf": st.lists(
            st.fixed_dictionaries({}, optional={"required": st.just(["b"]), "type": _TYPES}), min_size=1, max_size=1
        ),
    },
)
_SCHEMAS = st.recursive(
    st.one_of(_PARTS, _LEAVES),
    lambda inner: st.one_of(
        st.builds(
            lambda name, few: {name: few}, st.sampled_from(["oneOf", "anyOf"]), st.lists(inner, min_size=1, max_size=2)
        ),
        st.builds(lambda one, part: {"type": "object", "properties": {"a": one}, **part}, inner, _PARTS),
        st.builds(lambda one: {"$schema": "http://json-schema.org/draft-04/schema#", "allOf": [one]}, inner),
    ),
    max_leaves=4,
)
_DRAFTS = st.sampled_from(
    [
        {},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
    ]
)


@given(
    _PARTS,
    st.lists(_SCHEMAS, min_size=1, max_size=3),
    _SCHEMAS,
    st.none() | st.lists(_PARTS, min_size=1, max_size=2),
    _DRAFTS,
)
def test_what_satisfies_the_replacement_satisfies_the_schema(
    around: dict[str, Any], schemas: list[Any], named: Any, others: list[Any] | None, draft: dict[str, Any]
) -> None:
    schema = {**around, **draft, "oneOf": schemas, "$defs": {"one": {"const": 1}, "x": named}}
    if others is not None:
        schema["anyOf"] = others
    try:
        given_one, replaced = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(kept(schema))
    except (UnkeptSchema, jsonschema_rs.ValidationError):  # as are "$ref" in a circle, and false in draft 4
        return
    for value in _VALUES:
        assert given_one.is_valid(value) or not replaced.is_valid(value), value


def is_replaced(*schemas: Any, **around: Any) -> bool:
    """Whether `oneOf` is replaced, and something satisfies each of its schemas."""
    schema = {**around, "oneOf": [*schemas]}
    changed = kept(schema)
    if "oneOf" in changed:
        return False
    validator = jsonschema_rs.validator_for({**schema, **changed})
    found = {
        number
        for value in _VALUES
        if validator.is_valid(value)
        for number, each in enumerate(schemas)
        if jsonschema_rs.validator_for({**around, **each}).is_valid(value)
    }
    return found == set(range(len(schemas)))


def test_schemas_that_exclude_each_other_are_replaced() -> None:
    assert is_replaced({"type": "null"}, {"type": "integer"}, {"type": ["object", "string"]})
    assert is_replaced({"const": 1}, {"enum": [0, "x"]}, {"const": True})
    assert is_replaced({"const": 1, "title": "one"}, {"const": 0}, type="integer")
    assert is_replaced({"enum": [1]}, {"type": "string"})
    tags = [{"type": "object", "properties": {"a": {"const": value}}} for value in (0, 1, "x")]
    assert is_replaced(*tags)
    assert is_replaced(*({**tag, "required": ["a"]} for tag in tags))
    assert is_replaced({"$ref": "#/$defs/n"}, tags[0], **{"$defs": {"n": {"type": "null"}}})


def test_schemas_that_require_different_properties_are_narrowed() -> None:
    assert is_replaced({"required": ["a"]}, {"required": ["b"]})
    given = [
        {"properties": {"a": {"const": 0}, "b": {"const": 1}}, "required": ["b"]},
        {"properties": {"b": {"const": 0}, "c": {}}, "required": ["c"]},
    ]
    assert "required" not in kept({"type": "object", "oneOf": given})["anyOf"][1] or is_replaced(*given, type="object")
    closed = [{"properties": {name: {}}, "additionalProperties": False, "required": [name]} for name in "ab"]
    assert is_replaced(*closed)


def test_schemas_that_may_both_be_satisfied_are_left_as_they_are() -> None:
    assert not is_replaced({"type": "integer"}, {"type": "number"})
    assert not is_replaced({"const": 1}, {"const": 1.0})
    assert not is_replaced({"required": ["a"]}, {"required": ["a", "b"]})
    assert not is_replaced({"properties": {"a": {}}}, {"properties": {"b": {}}})
    assert not is_replaced({"type": "string", "pattern": "x"}, {"type": "string", "maxLength": 3})
    assert not is_replaced({}, {"type": "null"})
    inside = {"properties": {"b": {"$id": "http://a/b"}}}
    assert not is_replaced({"$ref": "#/$defs/n"}, {"type": "integer"}, **{"$defs": {"n": {"type": "null"}}}, **inside)


def test_tags_that_a_discriminator_names_are_required() -> None:
    ways = [
        {"type": "object", "properties": {"a": {"const": value}, name: {}}, "additionalProperties": False}
        for value, name in ((0, "b"), (1, "c"))
    ]
    ways = [{**way, "required": [name]} for way, name in zip(ways, "bc", strict=True)]
    assert kept({"oneOf": ways}) == {"anyOf": ways}
    tagged = {"oneOf": ways, "discriminator": {"propertyName": "a"}}
    assert [way["required"] for way in kept(tagged)["anyOf"]] == [["b", "a"], ["c", "a"]]
    nested = kept({"oneOf": [tagged, {"type": "null"}]})
    assert [way.get("required") for way in nested["anyOf"]] == [["b", "a"], ["c", "a"], None]


def test_many_schemas_take_no_time_that_grows_with_their_depth() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(24):
        ways = [{"type": "object", "properties": {"a": {"const": value}, "b": schema}} for value in (0, 1)]
        schema = {"oneOf": [ways[0], {**ways[1], "properties": {"a": {"const": 1}}}]}
    assert "anyOf" in kept(schema)
    chain = {
        str(number): {
            "type": "object",
            "properties": {"a": {"const": 0}, "b": {"oneOf": [{"$ref": f"#/$defs/{number + 1}"}, ways[1]]}},
        }
        for number in range(300)
    }
    chain["300"] = ways[0]
    assert len(kept({"$defs": chain, "oneOf": [{"$ref": "#/$defs/0"}, ways[1]]})["$defs"]) > 600
