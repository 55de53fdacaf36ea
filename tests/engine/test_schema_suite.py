"""The schemas of JSON-Schema-Test-Suite: each is refused, or all that a random model says satisfies it.

BATCHWRIGHT_SCHEMA_SUITE names a folder of its files, such as `json/tests/draft2020-12` of jsonschema's source
distribution. Without it, a few schemas that are written here stand for them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from batchwright import Engine, InvalidRequest, SamplingParams

from .structured import byte_tokenizer
from .support import TINY, tiny_model

SUITE = os.environ.get("BATCHWRIGHT_SCHEMA_SUITE")
SAMPLES = 8
_FEW: list[Any] = [
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "items": {"type": "string", "maxLength": 2}},
    {"allOf": [{"properties": {"bar": {"type": "integer"}}, "required": ["bar"]}, {"required": ["foo"]}]},
    {
        "properties": {"foo": {}, "bar": {}},
        "patternProperties": {"^v": {"type": "null"}},
        "additionalProperties": False,
    },
    {"type": "array", "prefixItems": [{"enum": [False, 0, None]}], "minItems": 1, "maxItems": 2},
    {"type": "object", "minProperties": 1, "maxProperties": 2},
    {"type": "array", "uniqueItems": True},
    {"properties": {"kind": {"const": "a"}}, "if": {"required": ["kind"]}, "then": {"required": ["b"]}},
]


def schemas() -> Iterator[tuple[str, Any]]:
    """Names and schemas; those that are no objects are no schemas for answers."""
    if SUITE is None:
        yield from ((f"here #{number}", schema) for number, schema in enumerate(_FEW))
        return
    for path in sorted(Path(SUITE).rglob("*.json")):
        for number, case in enumerate(json.loads(path.read_text())):
            if isinstance(case.get("schema"), dict):
                yield f"{path.stem} #{number}", case["schema"]


def _finite(number: str) -> float:
    """A number as a float, which for 1e999 is infinite and then none for the validator."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, "llama", **TINY | {"vocab_size": 311, "max_position_embeddings": 512})
    byte_tokenizer(folder)
    with Engine(folder, dtype="float32", kv_memory="8MB") as made:
        yield made


def test_nothing_ends_that_a_validator_rejects(engine: Engine) -> None:
    refused: Counter[str] = Counter()
    wrong: list[str] = []
    whole = cut = unknown = failed = 0
    for name, schema in schemas():
        params = [SamplingParams(schema=schema, max_tokens=80, temperature=1.0, seed=seed) for seed in range(SAMPLES)]
        responses = engine.generate(["abc"] * SAMPLES, params)
        if isinstance(responses[0].error, InvalidRequest):
            keywords = re.findall(r'"([^"]+)"', str(responses[0].error).partition("not supported:")[2])
            refused[keywords[0] if "has keywords" in str(responses[0].error) else "other"] += 1
            continue
        try:
            validator = jsonschema_rs.validator_for(schema)
        except (jsonschema_rs.ValidationError, ValueError):  # it refers to schemas elsewhere, or is none
            unknown += 1
            continue
        for response in responses:
            failed += response.error is not None
            cut += response.finish_reason == "length"
            if response.finish_reason == "stop":
                whole += 1
                if not validator.is_valid(json.loads(response.output, parse_float=_finite)):
                    wrong.append(f"{name}: {json.dumps(schema)[:300]} -> {response.output}")
    print(f"{whole} whole, {cut} cut, {failed} failed, {unknown} unknown to the validator; refused: {refused}")
    assert whole
    assert not wrong, "\n".join(wrong)
