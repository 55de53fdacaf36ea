"""Answers of a given form: whatever the model would say, what ends by itself has the form."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import numpy as np
import pytest
import torch

from batchwright import AsyncEngine, Engine, InferenceRequest, InferenceResponse, SamplingParams
from batchwright.constraints import Constraint
from batchwright.engine.grammars import Grammars, MaskMaker, refusal_of
from batchwright.engine.sampling import mask_rows
from batchwright.engine.tokenizer import Tokenizer as ModelTokenizer
from batchwright.errors import InvalidRequest

from .structured import byte_tokenizer
from .support import TINY, nothing_left, tiny_model

PEOPLE = ["Ann is 30 and lives in Rome.", "Describe Bob.", "Who is the oldest of them all?"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "given_name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
        "is_member": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["given_name", "age", "favourite_colour", "is_member", "tags"],
    "additionalProperties": False,
}
FORM = SamplingParams(schema=SCHEMA, max_tokens=120, temperature=1.0, seed=1)

SCHEMAS: list[Any] = [
    SCHEMA,
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "integer"},
    {"type": "integer", "exclusiveMinimum": 3, "maximum": 17},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["integer", "null"]},
    {"const": {"a": [1, "x", None]}},
    {"enum": [1, "one", [1], {"a": 1}]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {}, "b": {"type": "null"}}, "required": ["b"]},
    {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "pattern": "z"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
    {
        "$defs": {"node": {
            "type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["next"], "additionalProperties": False,
        }},
        "$ref": "#/$defs/node",
    },
    {},
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose logits are wider than its vocabulary."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, "llama", **TINY | {"vocab_size": 311, "max_position_embeddings": 512})
    byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Engine]:
    with Engine(tiny, dtype=request.param, kv_memory="8MB") as made:
        yield made
        assert nothing_left(made)


@pytest.fixture(scope="module")
def real(shallow_path: Path) -> Iterator[Engine]:
    with Engine(shallow_path, dtype="bfloat16", kv_memory="60MB", max_model_len=1024) as made:
        yield made
        assert nothing_left(made)


def fits(schema: Any, text: str) -> bool:
    # Of a date only the form is kept: the 29th of February comes every year.
    checks_formats = "date" not in json.dumps(schema)
    return bool(jsonschema_rs.Draft202012Validator(schema, validate_formats=checks_formats).is_valid(json.loads(text)))


def assert_forms(responses: list[InferenceResponse], schema: Any) -> int:
    """Check all choices, and return how many of them ended by themselves."""
    whole = 0
    for response in responses:
        assert response.error is None
        for choice in response.choices:
            assert choice.finish_reason in ("stop", "length")
            if choice.finish_reason == "stop":
                assert fits(schema, choice.text), choice.text
                whole += 1
    return whole


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_what_ends_by_itself_satisfies_the_schema(engine: Engine, schema: Any) -> None:
    params = [replace(FORM, schema=schema, seed=seed) for seed in range(6)]
    params += [replace(each, temperature=3.0, top_p=0.9) for each in params[:3]]
    params += [replace(each, logprobs=1, frequency_penalty=2.0) for each in params[:3]]
    responses = engine.generate(["abc"] * len(params), params)
    whole = assert_forms(responses, schema)
    bounded = {"maxLength", "enum", "const", "boolean", "maximum", "uuid"} & set(re.findall(r"\w+", json.dumps(schema)))
    assert whole or not bounded


def test_a_greedy_answer_is_the_likeliest_text_of_its_form(real: Engine) -> None:
    responses = real.generate(PEOPLE, replace(FORM, temperature=0.0, seed=None))
    assert assert_forms(responses, SCHEMA) == len(PEOPLE)
    assert [response.parsed for response in responses] == [json.loads(response.output) for response in responses]


def test_each_form(real: Engine) -> None:
    @dataclass
    class Person:
        relation: Literal["friend", "stranger"]  # a text could be as long as the limit
        is_alive: bool

    asked = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
    regex, choice, grammar, whole, person = real.generate(
        ["A number:"] * 5,
        [
            replace(asked, regex=r"[0-9]{3}-[0-9]{2}"),
            replace(asked, choices=("yes", "no", "héé \"quoted\"\n🙂")),
            replace(asked, grammar='start: "<" WORD ">"\nWORD: /[a-f]{2,5}/'),
            replace(asked, json_object=True, temperature=0.3),
            replace(asked, schema=Person),
        ],
    )  # fmt: skip
    assert re.fullmatch(r"[0-9]{3}-[0-9]{2}", regex.output)
    assert choice.output in ("yes", "no", 'héé "quoted"\n🙂')
    assert re.fullmatch("<[a-f]{2,5}>", grammar.output)
    assert whole.finish_reason == "length" or isinstance(whole.parsed, dict)
    assert isinstance(person.parsed, Person)
    assert regex.parsed is choice.parsed is None


def test_a_choice_with_every_kind_of_character(engine: Engine) -> None:
    texts = ['a"b\\c\n\t', "\u2028é🙂", "'/#|", "\x01x", "${}%%"]
    for text in texts:
        (response,) = engine.generate(["x"], SamplingParams(choices=(text,), max_tokens=40))
        assert (response.output, response.finish_reason, response.error) == (text, "stop", None)


def test_an_answer_that_is_cut_says_so(engine: Engine) -> None:
    (response,) = engine.generate(["x"], replace(FORM, max_tokens=9))
    assert (response.finish_reason, len(response.token_ids), response.parsed) == ("length", 9, None)


def test_several_answers_each_have_the_form_and_are_different(engine: Engine) -> None:
    (response,) = engine.generate(["x"], replace(FORM, n=6))
    assert assert_forms([response], SCHEMA) >= 5
    assert len({choice.text for choice in response.choices}) == 6


def test_a_seeded_answer_is_the_same_in_any_company(engine: Engine) -> None:
    several = [replace(FORM, seed=seed) for seed in range(8)]
    together = engine.generate(["abc"] * 8, several)
    alone = [engine.generate(["abc"], params)[0] for params in several]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"n": 3}])
def test_forced_tokens_take_no_steps_and_are_the_texts_only_way(tiny: Path, params: dict[str, Any]) -> None:
    asked = replace(FORM, **params)
    with Engine(tiny, dtype="float32", kv_memory="8MB") as engine:
        forcing = engine.generate(["x"] * 4, asked)
        assert engine.stats.forced_tokens > 100
        chosen = engine.stats.masks
        assert chosen + engine.stats.forced_tokens == engine.stats.generated_tokens
        assert assert_forms(forcing, SCHEMA) >= 3


def test_forced_tokens_change_no_greedy_text(real: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(FORM, temperature=0.0, seed=None)
    monkeypatch.setattr(real.core.scheduler, "draft_rows", 0)  # the second run would guess from the first
    steps = real.stats.steps
    forcing = [each.output for each in real.generate(PEOPLE, asked)]
    with_force = real.stats.steps - steps
    monkeypatch.setattr("batchwright.engine.grammars.Matcher.forced", lambda self: [])
    steps = real.stats.steps
    assert [each.output for each in real.generate(PEOPLE, asked)] == forcing
    assert with_force < (real.stats.steps - steps) * 0.8


def test_preempted_and_recomputed_answers_are_the_same(tiny: Path) -> None:
    asked = [replace(FORM, seed=seed) for seed in range(12)]
    prompts = [f"{seed} " * 10 for seed in range(12)]
    with Engine(tiny, dtype="float32", kv_memory="8MB") as roomy:
        expected = [each.token_ids for each in roomy.generate(prompts, asked)]
        per_block = sum(shape.bytes_per_block for shape in roomy.core.body.kv_shapes(1, 16, "auto"))
    with Engine(tiny, dtype="float32", kv_memory=26 * per_block, max_batch_tokens=40) as tight:
        got = tight.generate(prompts, asked)
        assert tight.stats.preemptions > 0
        assert [each.error for each in got] == [None] * 12
        assert [each.token_ids for each in got] == expected
        assert nothing_left(tight)


def test_log_probabilities_are_the_models_own(engine: Engine) -> None:
    plain, named = engine.generate(["x"] * 2, [replace(FORM, max_tokens=30), replace(FORM, max_tokens=30, logprobs=3)])
    entries = named.choices[0].logprobs
    assert entries is not None
    assert len(entries) == len(named.token_ids)
    assert all(entry.logprob <= entry.top[0][2] + 1e-6 for entry in entries)
    assert any(entry.token_id not in [token for token, _, _ in entry.top] for entry in entries)
    assert plain.error is None


@pytest.mark.parametrize(
    "params",
    [{"min_tokens": 60}, {"ignore_eos": True}, {"logit_bias": {264: 100.0}}, {"min_tokens": 60, "logprobs": 0}],
)
def test_a_complete_form_ends_whatever_else_is_asked(engine: Engine, params: dict[str, Any]) -> None:
    asked = SamplingParams(regex="[ab]{3}", max_tokens=60, temperature=1.0, seed=5, **params)
    (response,) = engine.generate(["x"], asked)
    assert re.fullmatch("[ab]{3}", response.output)
    assert response.finish_reason == "stop"


def test_an_end_is_put_off_as_long_as_the_form_can_go_on(engine: Engine) -> None:
    asked = SamplingParams(regex="[ab]*", max_tokens=40, min_tokens=20, temperature=1.0)
    for response in engine.generate(["x"] * 5, asked):
        assert len(response.output) >= 20
    (endless,) = engine.generate(["x"], replace(asked, ignore_eos=True))
    assert (endless.finish_reason, len(endless.output)) == ("length", 40)


def test_a_stop_token_ends_a_form_that_ignores_other_ends(engine: Engine) -> None:
    (letter,) = engine.core.tokenizer.encode("b")
    asked = SamplingParams(regex="[ab]*", max_tokens=60, min_tokens=20, temperature=1.0, ignore_eos=True, seed=1)
    for response in engine.generate(["x"] * 3, replace(asked, stop_token_ids=(letter,))):
        assert response.finish_reason == "stop"
        assert 20 <= len(response.token_ids) < 60


def test_schemas_in_a_grammar_are_kept_to_as_others_are(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    guided = json.dumps(schema | {"x-guidance": {"whitespace_flexible": True}})
    asked = SamplingParams(grammar=f'start: "x" %json {guided} "y"', temperature=2.0, max_tokens=60)
    assert [each.output for each in engine.generate(["x"] * 4, asked)] == ['x{"a":1}y'] * 4
    refused = SamplingParams(grammar='start: %json {"type": "number", "multipleOf": 0.01}')
    (response,) = engine.generate(["x"], refused)
    assert "multipleOf: 0.01 has no exact double" in str(response.error)


def test_a_stop_text_ends_an_answer_of_any_form(engine: Engine) -> None:
    (response,) = engine.generate(["x"], replace(FORM, stop=('"age"',)))
    assert response.finish_reason == "stop"
    assert '"given_name"' in response.output
    assert "age" not in response.output


def test_a_stream_gives_the_same_text(engine: Engine) -> None:
    (whole,) = engine.generate(["x"], FORM)
    events = [*engine.stream("x", FORM)]
    assert "".join(event.text for event in events) == whole.output
    assert [token for event in events for token in event.token_ids] == list(whole.token_ids)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"schema": {"if": {}, "then": {}}}, "schema", '# has keywords that are not supported: ["if", "then"]'),
    (
        {"schema": {"type": "object", "properties": {"a/b": {"items": {"uniqueItems": True}}}}},
        "schema",
        '#/properties/a~1b/items has keywords that are not supported: ["uniqueItems"]',
    ),
    ({"schema": {"$defs": {"x": {"contains": {}}}, "anyOf": [{}, {"$ref": "#/$defs/x"}]}}, "schema", "#/"),
    ({"schema": {"type": "string", "format": "colour"}}, "schema", "colour"),
    ({"schema": {"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}}, "schema", "#/properties/a is not"),
    ({"schema": {"items": {"type": "integer", "multipleOf": 9_999_991}}}, "schema", "multipleOf"),
    ({"schema": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9.967}]}}, "schema", "multipleOf"),
    ({"grammar": 'start: %json {"multiple\\u004ff": 9999991}'}, "grammar", "multipleOf"),
    ({"schema": {"x-guidance": {"lenient": True}, "not": {}}}, "schema", "not"),
    ({"schema": {"type": "string", "pattern": "(?=a)b"}}, "schema", "look-around"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"grammar": "start: missing"}, "grammar", "missing"),
]


@pytest.mark.parametrize(("params", "param", "told"), REFUSED)
def test_what_cannot_be_kept_is_refused_before_anything_is_computed(
    engine: Engine, params: dict[str, Any], param: str, told: str
) -> None:
    steps = engine.stats.steps
    for _ in range(2):
        (response,) = engine.generate(["x"], SamplingParams(**params))
        assert isinstance(response.error, InvalidRequest)
        assert response.error.param == param
        assert str(response.error).startswith(f"{param}: ")
        assert told in str(response.error)
    assert engine.stats.steps == steps


HOSTILE: list[dict[str, Any]] = [
    {"schema": {"allOf": [
        {"anyOf": [{"type": "object", "properties": {f"k{i}{j}": {"type": "string"}}} for j in range(4)]}
        for i in range(8)
    ]}},
    {"schema": {"type": "integer", "multipleOf": 9_973, "maximum": 10**12, "minimum": 0}},
    {"schema": {"type": "string", "pattern": "^(.*a.*b.*c.*d.*e.*f.*){20}$"}},
    {"schema": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}},
    {"regex": "(.*a.*b.*){1,50}x"},
    {"grammar": 'start: e\ne: e e | "a" | e "b" e | /[a-z]*/ e'},
]  # fmt: skip


def test_a_hostile_form_fails_alone(engine: Engine) -> None:
    asked = [SamplingParams(**form, max_tokens=20, temperature=1.0) for form in HOSTILE]
    *hostile, fair = engine.generate(["x"] * (len(asked) + 1), [*asked, FORM])
    assert_forms([fair], SCHEMA)
    assert all(response.error is not None or response.finish_reason in ("stop", "length") for response in hostile)


# Of two letters a draft guesses many right, whatever a processor's rounding makes of random weights.
SPELLED = {"type": "string", "pattern": "^[ab]{24}$"}
SPELLED_FIRST = SCHEMA | {
    "properties": {"spelled": SPELLED, **SCHEMA["properties"]},
    "required": ["spelled", *SCHEMA["required"]],
}


@pytest.mark.parametrize("schema", [SPELLED_FIRST, {"type": "array", "items": SPELLED}], ids=["object", "list"])
def test_drafts_within_a_grammar_change_no_token(tiny: Path, schema: Any) -> None:
    asked = replace(FORM, schema=schema, temperature=0.0, seed=None)
    prompts = ['["ab", "ab", "ab", "ab"]', '{"spelled":"abbaabbaabbaabbaabbaabba","given_name":"a"}', *"qrstuvwx"]
    answers = []
    for drafting in (True, False):
        with Engine(tiny, dtype="bfloat16", kv_memory="8MB", max_num_seqs=2, drafting=drafting) as engine:
            if not engine.core.body.free_rows:
                pytest.skip("further rows are not free here: no compiled products")
            answers.append([each.token_ids for each in engine.generate(prompts, asked)])
            assert bool(engine.stats.accepted_tokens) == drafting
    assert answers[0] == answers[1]


def test_a_schema_is_compiled_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    from batchwright.engine import grammars

    compile_one = grammars._compile

    def counted(*given: Any) -> Any:
        compiled.append(given)
        return compile_one(*given)

    monkeypatch.setattr(grammars, "_compile", counted)
    with Engine(tiny, dtype="float32", kv_memory="8MB") as engine:
        engine.generate(["x"] * 20, replace(FORM, max_tokens=3))
        engine.generate(["x"] * 2, replace(FORM, schema=dict(SCHEMA), max_tokens=3))
        assert len(compiled) == 1
        for number in range(140):
            engine.generate(["x"], SamplingParams(choices=(f"c{number}",), max_tokens=2))
        engine.generate(["x"], replace(FORM, max_tokens=3))
        assert len(compiled) == 142


def test_a_model_without_a_tokenizer_refuses_forms(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    with Engine(tmp_path, dtype="float32", kv_memory="8MB") as engine:
        (response,) = engine.generate([[1, 2, 3]], SamplingParams(regex="a", max_tokens=5))
        assert isinstance(response.error, InvalidRequest)
        assert "tokenizer.json" in str(response.error)


def test_who_asks_what_is_compiled_does_not_wait_for_the_tokenizer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ModelTokenizer(tiny, 311)
    grammars, form = Grammars(tokenizer, 311), Constraint("regex", "a")
    asked: list[bool] = []

    def read() -> None:
        other = threading.Thread(target=lambda: grammars.form(form).is_compiled, daemon=True)
        other.start()
        other.join(10)
        asked.append(other.is_alive())

    monkeypatch.setattr(tokenizer, "as_json", read)
    for _ in range(2):  # nor is it read again if there is none
        with pytest.raises(InvalidRequest, match=r"regex: .*tokenizer\.json"):
            grammars.matcher(form)
    assert asked == [False]


@pytest.mark.parametrize("kept", [64, 3])
def test_the_part_that_is_refused_is_looked_for_within_bounds(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    from batchwright.engine import grammars

    tried: list[object] = []
    refusal = grammars._refusal

    def counted(schema: dict[str, Any]) -> str | None:
        tried.append(schema)
        return refusal(schema)

    monkeypatch.setattr(grammars, "_refusal", counted)
    many = {f"p{number}": {"$ref": "#/$defs/s"} for number in range(90)}
    bad = {"oneOf": [{"type": "string"}, {"minLength": 1}]}
    shared = {"s": {"enum": ["x" * (65_000 if kept == 3 else 5)]}}
    schema = {"$defs": shared, "type": "object", "properties": {**many, "z": bad}}
    with pytest.raises(InvalidRequest, match="schema: # is not supported"):
        Grammars(ModelTokenizer(tiny, 311), 311).matcher(Constraint("schema", json.dumps(schema)))
    assert len(tried) <= kept


def test_asynchronous_callers(tiny: Path) -> None:
    async def ask() -> None:
        async with AsyncEngine(tiny, dtype="float32", kv_memory="8MB") as engine:
            answers = await asyncio.gather(*(engine.generate("x", replace(FORM, seed=seed)) for seed in range(6)))
            assert assert_forms(list(answers), SCHEMA) >= 5
            with pytest.raises(InvalidRequest, match="unclosed group"):
                await engine.generate("x", SamplingParams(regex="(a"))
            assert (await engine.generate(InferenceRequest("x", choices=("ja",)))).output == "ja"

    asyncio.run(ask())


def test_masks_after_drafts_are_those_of_their_places(tiny: Path) -> None:
    grammars = Grammars(ModelTokenizer(tiny, 311), 311)
    constraint = SamplingParams(regex="ab*c").constraint
    assert constraint is not None
    text = [ModelTokenizer(tiny, 311).encode(letter)[0] for letter in "abbc"]
    maker = MaskMaker(311)
    together = maker.masks([(grammars.matcher(constraint), text[:3]), (grammars.matcher(constraint), [])])
    matcher = grammars.matcher(constraint)
    assert matcher.allowed([*text, text[0]]) == 4
    for row in range(4):
        (alone,) = maker.masks([(matcher, [])])
        assert np.array_equal(together[row], alone)
        matcher.advance(text[row])
    assert matcher.is_complete
    assert np.array_equal(together[4], together[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masked_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 77, dtype=torch.float64).to(dtype)
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 3), np.int32)
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :77].astype(bool)
    expected = logits.clone()
    expected[[3, 1]] = torch.where(torch.from_numpy(allowed), logits[[3, 1]], -torch.inf)
    mask_rows(logits, [3, 1], masks)
    assert torch.equal(logits, expected)


_ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint("regex", r"[^\s\S]"), "regex: there is no text that it allows"),
        (Constraint("schema", '{"$ref": "#"}'), "schema: there is no text that it allows"),
        (Constraint("schema", json.dumps(_ENDLESS)), "schema: the beginning of an answer takes too much work"),
        (Constraint("regex", "(a{1000}){1000}"), "regex: the beginning of an answer takes too much work"),
        (Constraint("grammar", 'start: "x" start'), "grammar: the beginning of an answer takes too much work"),
    ],
)
def test_a_form_that_no_text_can_begin_is_refused(tiny: Path, constraint: Constraint, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Grammars(ModelTokenizer(tiny, 311), 311).matcher(constraint)
    assert str(refused.value).startswith(told)
    assert str(refused.value) == f"{constraint.kind}: {refusal_of(constraint)}"


def test_an_object_with_too_many_optional_properties_is_refused(tiny: Path) -> None:
    names = [f"p{number}" for number in range(401)]
    item = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}}
    grammars = Grammars(ModelTokenizer(tiny, 311), 311)
    with pytest.raises(InvalidRequest, match=r"#/items has 401 properties that are not.*in required"):
        grammars.matcher(Constraint("schema", json.dumps({"type": "array", "items": item})))
    grammars.matcher(Constraint("schema", json.dumps({"type": "array", "items": item | {"required": names[:1]}})))
