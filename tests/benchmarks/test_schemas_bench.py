"""What the benchmark of schemas reads, asks of validators and tells of refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.validity.refusals import keyword_of
from benchmarks.validity.sources import read_source
from benchmarks.validity.validators import Validators

from batchwright.constraints import Constraint
from batchwright.engine.grammars import refusal_of


def test_schemas_are_files_or_cases(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "one.json").write_text('{"type": "null"}')
    (tmp_path / "below" / "cases.json").write_text('[{"schema": {"const": 1}}, {"schema": true}, {"schema": {}}]')
    (tmp_path / "cut.json").write_text('{"type":')
    source = read_source(tmp_path, 10, seed=1)
    assert source.schemas == [("below/cases #0", {"const": 1}), ("below/cases #2", {}), ("one", {"type": "null"})]
    assert (source.total, source.left_out) == (3, 2)
    assert len(read_source(tmp_path, 2, seed=1).schemas) == 2
    assert read_source(tmp_path, 2, seed=1) == read_source(tmp_path, 2, seed=1)


@pytest.mark.parametrize(
    ("schema", "text", "said"),
    [
        ({"type": "string", "format": "time"}, '"12:00:00"', "jsonschema, format"),
        ({"multipleOf": 0.5}, "3.5", None),
        ({"multipleOf": 0.01}, "0.355", "jsonschema, multipleOf"),
        ({"type": "number"}, "1e999", None),
        ({"type": "number"}, "NaN", "not JSON"),
        ({"type": "string"}, '"a', "not JSON"),
        ({"$ref": "http://localhost:9/none"}, "1", None),
        (
            {"$schema": "http://json-schema.org/draft-04/schema#", "exclusiveMinimum": True, "minimum": 1},
            "1",
            "jsonsch",
        ),
    ],
)
def test_answers_are_judged_in_the_draft_of_the_schema(schema: Any, text: str, said: str | None) -> None:
    found = Validators.of(schema).rejections(text)
    assert found[0].startswith(said) if said else not found


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"uniqueItems": True, "not": {}}, "not"),
        ({"type": "string", "format": "colour"}, "format"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
        ({"type": "string", "pattern": "[]a]"}, "pattern"),
        ({"oneOf": [{}, {}]}, "oneOf"),
        ({"minProperties": 2}, "minProperties"),
        ({"const": 1e300}, "const"),
        ({"multipleOf": 9_999_991}, "multipleOf"),
        ({"$ref": "#/none"}, "$ref"),
        ({"allOf": [{"type": "null"}, {"type": "string"}]}, "no answer satisfies it"),
        ({"type": "any"}, "no schema"),
    ],
)
def test_a_refusal_is_counted_by_its_keyword(schema: Any, keyword: str) -> None:
    refusal = refusal_of(Constraint("schema", json.dumps(schema)))
    assert refusal is not None
    assert keyword_of(f"schema: {refusal}") == keyword, refusal
