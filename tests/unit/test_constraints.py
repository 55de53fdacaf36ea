"""Forms of answers: which schema a class has, what a text is parsed as, and what no answer could have."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field

from batchwright import SamplingParams
from batchwright.constraints import MAX_NESTING, Constraint, parsed_as, schema_of
from batchwright.errors import InvalidRequest
from batchwright.inference.inference import Call
from batchwright.inference.replicas.messages import Ask, decode_for_replica, encoded
from batchwright.request import Choice, portable


class Kind(Enum):
    BIRD = "bird"
    FISH = "fish"


@dataclass
class Animal:
    name: str
    kind: Kind
    legs: int = 2
    young: list[str] = field(default_factory=list)


class Review(BaseModel):
    stars: int = Field(ge=1, le=5)
    tone: Literal["kind", "harsh"]


class Pair(TypedDict):
    left: int
    right: int


@pytest.mark.parametrize("kind", [Animal, Review, Pair, list[Animal], list[Review], Kind])
def test_a_class_has_a_schema_without_other_properties(kind: Any) -> None:
    schema = schema_of(kind)
    assert json.loads(json.dumps(schema)) == schema
    objects = [each for each in [schema, *schema.get("$defs", {}).values()] if each.get("type") == "object"]
    assert all(each["additionalProperties"] is False for each in objects)
    assert objects or kind is Kind


def test_a_text_becomes_an_object_of_the_class() -> None:
    assert parsed_as(Animal, '{"name":"a","kind":"bird"}') == Animal("a", Kind.BIRD)
    assert parsed_as(Review, '{"stars":4,"tone":"kind"}') == Review(stars=4, tone="kind")
    assert parsed_as(list[Review], '[{"stars":4,"tone":"kind"}]') == [Review(stars=4, tone="kind")]
    assert parsed_as({"type": "object"}, '{"a":1}') == {"a": 1}
    for text in ('{"name":"a","ki', "", '{"name":"a","kind":"cat"}'):
        with pytest.raises(ValueError, match=r"."):
            parsed_as(Animal, text)


def test_a_choice_that_was_cut_or_asked_for_no_json_has_no_value() -> None:
    assert Choice(0, '{"stars":4,"tone":"kind"}', (), "stop", form=Review).parsed == Review(stars=4, tone="kind")
    assert Choice(0, '{"stars":4,"to', (), "length", form=Review).parsed is None
    assert Choice(0, '{"stars":4}', (), "stop", form=True).parsed == {"stars": 4}
    assert Choice(0, '{"stars":4}', (), "stop").parsed is None
    assert Choice(0, "[" * 100_000, (), "length", form=True).parsed is None


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"schema": {"b": 1, "a": "é"}}, Constraint("schema", '{"b":1,"a":"é"}')),
        ({"json_object": True}, Constraint("json_object", "")),
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"choices": ["b", "a"]}, Constraint("choices", '["b","a"]')),
        ({"grammar": 'start: "a"'}, Constraint("grammar", 'start: "a"')),
        ({}, None),
    ],
)
def test_each_field_gives_its_constraint(given: dict[str, Any], constraint: Constraint | None) -> None:
    assert SamplingParams(**given).constraint == constraint


def test_only_one_form_can_be_asked_for() -> None:
    with pytest.raises(InvalidRequest, match="schema and regex are given together") as caught:
        SamplingParams(schema={}, regex="a")
    assert caught.value.param == "regex"


def test_nesting_is_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_NESTING - 1):
        schema = {"items": schema}
    assert SamplingParams(schema=schema).is_constrained
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match=f"more than {MAX_NESTING} levels"):
        SamplingParams(schema=schema)


def test_a_class_travels_as_its_schema() -> None:
    params = SamplingParams(schema=Animal, max_tokens=7)
    assert portable(params).schema == schema_of(Animal)
    assert portable(params).constraint == params.constraint
    assert portable(SamplingParams(regex="a")) == SamplingParams(regex="a")
    call = Call("/v1/chat/completions", {"messages": []}, "r", "batch", defaults=params)
    received = decode_for_replica(encoded(Ask.of(1, call, stream=False)))
    assert isinstance(received, Ask)
    assert received.call().defaults == portable(params)
