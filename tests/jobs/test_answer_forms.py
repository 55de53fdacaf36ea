"""`run` with answers of a given form: typed columns, and lines that are sent again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchwright.engine.engine import Engine
from batchwright.errors import ContextLengthExceeded, InputError, InvalidRequest, ResumeRefused
from batchwright.jobs.answers import answer_of
from batchwright.jobs.invalid_answers import INVALID_JSON, InvalidAnswers, marked_invalid
from batchwright.jobs.reading import read_results
from batchwright.jobs.run import run
from batchwright.jobs.schema_columns import PropertyColumn, columns_of, values_of
from batchwright.jobs.spec import JobSpec
from batchwright.request import FORM_FIELDS, Choice, InferenceRequest, SamplingParams
from batchwright.wire.chats import read_tools
from batchwright.wire.requests import read_generation, with_defaults

from .fakes import FakeEngine, decode, read

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "price": {"type": ["number", "null"], "minimum": 0, "maximum": 9},
        "tone": {"enum": ["kind", "harsh"]},
        "again": {"type": "boolean"},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        "by": {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["age"],
            "additionalProperties": False,
        },
    },
    "required": ["stars", "price", "tone", "again", "words", "by"],
    "additionalProperties": False,
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def engine(shallow_path: Path) -> Iterator[Engine]:
    with Engine(shallow_path, max_num_seqs=8, kv_memory="60MB") as made:
        yield made


@dataclass
class CuttingEngine(FakeEngine):
    """Its answers are JSON of `length` tokens, and cut where that is more than `max_tokens`."""

    length: int = 20
    context: int = 1000
    seeds: list[tuple[int, int | None]] = field(default_factory=list)

    def submit(self, request: InferenceRequest) -> None:
        if request.max_tokens > self.context:
            raise ContextLengthExceeded(f"max_tokens={request.max_tokens} is too long")
        self.seeds.append((request.max_tokens, request.seed))
        super().submit(request)

    def _choice(self, request: InferenceRequest, index: int) -> Choice:
        if request.max_tokens < self.length:
            return Choice(index, '{"a": [', (7,), "length")
        return Choice(index, '{"a": 1}', (7,), "stop")


def lines(path: Path, *bodies: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"prompt": "x", **body}) + "\n" for body in bodies))
    return path


def endings(path: Path) -> list[str]:
    return [line["response"]["body"]["choices"][0]["finish_reason"] for line in read(path)]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_properties_of_a_schema_are_typed_columns(tmp_path: Path, engine: Engine, suffix: str) -> None:
    source, output = tmp_path / "reviews.csv", tmp_path / f"out{suffix}"
    source.write_text("id,text\n" + "".join(f"{number},It was number {number}.\n" for number in range(6)))
    defaults = SamplingParams(schema=SCHEMA, max_tokens=200, temperature=1.0, seed=5)
    report = run(source, output, model=engine, prompt_template="Judge: {text}", defaults=defaults)
    assert (report.succeeded, report.failed) == (6, 0)
    assert report.forced_tokens > 100
    added = ["answer", *SCHEMA["properties"], "finish_reason", "error", "prompt_tokens", "completion_tokens"]
    if suffix == ".csv":
        assert output.read_text().splitlines()[0].split(",") == ["id", "text", *added]
        return
    if suffix == ".jsonl":
        for row in read(output):
            assert {name: row[name] for name in SCHEMA["properties"]} == json.loads(row["answer"])
        return
    table = pq.read_table(output)
    assert table.column_names == ["id", "text", *added]
    types = [pa.int64(), pa.float64(), pa.string(), pa.bool_(), pa.list_(pa.string()), pa.string()]
    assert [table.schema.field(name).type for name in SCHEMA["properties"]] == types
    for row in table.to_pylist():
        parsed = json.loads(row["answer"])
        assert {**{name: row[name] for name in SCHEMA["properties"]}, "by": json.loads(row["by"])} == parsed


def test_whole_numbers_of_more_than_64_bits_are_text(tmp_path: Path) -> None:
    @dataclass
    class CountingEngine(FakeEngine):
        def _choice(self, request: InferenceRequest, index: int) -> Choice:
            number = 2**64 if "large" in decode(request.prompt) else -(2**63)
            return Choice(index, json.dumps({"a": number, "b": [number, None], "c": 5}), (7,), "stop")

    source, output = tmp_path / "in.csv", tmp_path / "out.parquet"
    source.write_text("prompt\nsmall\nlarge\n")
    kinds: dict[str, Any] = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}}
    schema = {"type": "object", "properties": {**kinds, "c": {"type": "integer"}}}
    run(source, output, model=CountingEngine(), defaults=SamplingParams(schema=schema))  # type: ignore[arg-type]
    table = pq.read_table(output)
    assert table["a"].to_pylist() == [str(-(2**63)), str(2**64)]
    assert table["b"].to_pylist() == [f"[{-(2**63)}, null]", f"[{2**64}, null]"]
    assert table.schema.field("c").type == pa.int64()
    assert table["c"].to_pylist() == [5, 5]


def test_the_order_of_properties_is_part_of_a_job(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("text\ngood\n")
    reordered = SCHEMA | {"properties": dict(reversed(SCHEMA["properties"].items()))}
    assert reordered == SCHEMA
    given: Any = {"model": FakeEngine(), "prompt_template": "{text}"}
    output = tmp_path / "out.csv"
    run(source, output, defaults=SamplingParams(schema=SCHEMA), **given)
    made = output.read_bytes()
    with pytest.raises(ResumeRefused, match=r"schema \(then .*stars.*price.*, now .*price.*stars.*\)\. To go on"):
        run(source, output, defaults=SamplingParams(schema=reordered), **given)
    assert run(source, output, defaults=SamplingParams(schema=dict(SCHEMA)), **given).succeeded == 1
    assert output.read_bytes() == made
    # A bias has no order.
    for bias in ({1: 2.0, 3: 4.0}, {3: 4.0, 1: 2.0}):
        run(source, tmp_path / "biased.csv", defaults=SamplingParams(logit_bias=bias), **given)


def test_a_column_of_the_input_is_not_overwritten_by_a_property(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("stars,text\n5,good\n")
    given: Any = {"model": FakeEngine(), "prompt_template": "{text}", "defaults": SamplingParams(schema=SCHEMA)}
    with pytest.raises(InputError, match="'stars'"):
        run(source, tmp_path / "out.csv", **given)
    assert run(source, tmp_path / "out.csv", keep=["text"], **given).succeeded == 1


@pytest.mark.parametrize(("name", "remedy"), [("error", "in the schema"), ("answer", "--output-column")])
def test_a_property_with_the_name_of_another_column_is_named(tmp_path: Path, name: str, remedy: str) -> None:
    source = tmp_path / "in.csv"
    source.write_text("text\ngood\n")
    given: Any = {"model": FakeEngine(), "prompt_template": "{text}"}
    defaults = SamplingParams(schema={"type": "object", "properties": {name: {"type": "string"}, "x": {}}})
    with pytest.raises(InputError, match=f"two columns '{name}': .*{remedy}"):
        run(source, tmp_path / "out.csv", defaults=defaults, **given)


def test_a_cut_answer_is_asked_again_with_more_tokens_and_another_seed(tmp_path: Path) -> None:
    engine = CuttingEngine(length=20)
    source = lines(tmp_path / "in.jsonl", {"max_tokens": 6, "seed": 3}, {"max_tokens": 30}, {"guided_regex": "a"})
    defaults = SamplingParams(json_object=True, max_tokens=5)
    report = run(source, tmp_path / "out.jsonl", model=engine, defaults=defaults, retry_invalid=2)  # type: ignore[arg-type]
    assert sorted(endings(tmp_path / "out.jsonl")) == ["length", "stop", "stop"]
    assert [each for each in engine.seeds if each[1]] == [(6, 3), (12, 4), (24, 5)]
    assert (report.succeeded, report.asked_again) == (3, 2)
    assert (report.cut_answers, report.invalid_answers) == (1, 0)


@pytest.mark.parametrize("context", [1000, 9])
def test_an_answer_that_cannot_be_mended_says_so(tmp_path: Path, context: int) -> None:
    engine = CuttingEngine(length=900, context=context)
    source = lines(tmp_path / "in.jsonl", {"max_tokens": 6, "response_format": {"type": "json_object"}})
    report = run(source, tmp_path / "out.jsonl", model=engine, retry_invalid=3)  # type: ignore[arg-type]
    assert endings(tmp_path / "out.jsonl") == [INVALID_JSON]
    assert (report.succeeded, report.failed) == (1, 0)
    assert report.asked_again == (3 if context == 1000 else 1)
    assert (report.cut_answers, report.invalid_answers) == (0, 1)


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_an_answer_is_asked_again_with_as_many_tokens_as_the_context_holds(tmp_path: Path, field: str) -> None:
    prompt: Any = "x" if field == "prompt" else [{"role": "user", "content": "x"}]
    engine = CuttingEngine(length=60, context=100, max_model_len=100)
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({field: prompt, "max_tokens": 55, "response_format": {"type": "json_object"}}) + "\n")
    report = run(source, tmp_path / "out.jsonl", model=engine, retry_invalid=3)  # type: ignore[arg-type]
    assert endings(tmp_path / "out.jsonl") == ["stop"]
    (first, again), room = engine.submitted, 100 - len(engine.submitted[0].prompt)
    assert (first.max_tokens, again.max_tokens) == (55, room)
    assert (report.succeeded, report.asked_again) == (1, 1)


def test_without_being_told_nothing_is_asked_again(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", {"max_tokens": 6, "response_format": {"type": "json_object"}})
    report = run(source, tmp_path / "out.jsonl", model=CuttingEngine())  # type: ignore[arg-type]
    assert endings(tmp_path / "out.jsonl") == ["length"]
    assert report.asked_again == 0


def test_a_batch_of_a_provider_asks_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="retry_invalid=1"):
        run(tmp_path, tmp_path / "out", backend="http://127.0.0.1:9/v1", via="batch", retry_invalid=1)


def test_a_class_is_a_jobs_schema(tmp_path: Path, engine: Engine) -> None:
    @dataclass
    class Judgement:
        is_good: bool

    source = tmp_path / "in.csv"
    source.write_text("prompt\nGood?\n")
    run(source, tmp_path / "out.jsonl", model=engine, defaults=SamplingParams(schema=Judgement, max_tokens=30))
    (row,) = read(tmp_path / "out.jsonl")
    assert isinstance(row["is_good"], bool)
    again = run(source, tmp_path / "out.jsonl", model=engine, defaults=SamplingParams(schema=Judgement, max_tokens=30))
    assert again.resumed == 1


def test_a_line_whose_schema_is_refused_fails_by_the_name_of_its_field(tmp_path: Path, engine: Engine) -> None:
    source = lines(
        tmp_path / "in.jsonl",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"uniqueItems": True}}}}},
        {"structured_outputs": {"regex": "(a"}},
        {"guided_choice": ["yes"]},
    )
    run(source, tmp_path / "out.jsonl", model=engine, ordered=True)
    schema, regex, choice = read(tmp_path / "out.jsonl")
    assert schema["error"]["code"] == regex["error"]["code"] == "invalid_request"
    assert schema["error"]["message"].startswith("response_format: #/items has keywords that are not supported")
    assert regex["error"]["message"].startswith("structured_outputs: ")
    assert choice["response"]["body"]["choices"][0]["text"] == "yes"


@pytest.mark.parametrize(
    ("schema", "kind", "is_list"),
    [
        ({"type": "integer"}, "integer", False),
        ({"type": ["null", "string"]}, "string", False),
        ({"type": ["integer", "string"]}, "json", False),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "number", False),
        ({"anyOf": [{"type": "number"}, {"type": "string"}]}, "json", False),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, "string", True),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "number", False),
        ({"type": ["integer", "number", "null"]}, "number", False),
        ({"type": "string", "anyOf": [{"minLength": 2}, {"pattern": "a"}]}, "string", False),
        ({"oneOf": [{"type": "null", "title": "None"}, {"type": "boolean"}]}, "boolean", False),
        ({"oneOf": [{"const": None}, {"$ref": "#/$defs/colour"}]}, "string", False),
        ({"allOf": [{"$ref": "#/$defs/colour"}], "default": "red"}, "string", False),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "json", False),
        ({"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, "integer", True),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, "json", False),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}]}, "json", False),
        ({"$ref": "#/$defs/lists"}, "json", False),
        ({"anyOf": [{"type": "null"}]}, "json", False),
        ({"enum": ["a", "b", None]}, "string", False),
        ({"enum": [1, 2.5]}, "number", False),
        ({"enum": [1, "x"]}, "json", False),
        ({"const": True}, "boolean", False),
        ({"$ref": "#/$defs/colour"}, "string", False),
        ({"$ref": "#/$defs/loop"}, "json", False),
        ({"$ref": "#/$defs/either"}, "json", False),
        ({"type": "array", "items": {"$ref": "#/$defs/colour"}}, "string", True),
        ({"type": "array", "items": {"type": "object"}}, "json", False),
        ({"type": "array"}, "json", False),
        ({"type": "object"}, "json", False),
        (True, "json", False),
    ],
)
def test_types_of_columns(schema: Any, kind: Any, is_list: bool) -> None:
    defs = {"colour": {"enum": ["red"]}, "loop": {"$ref": "#/$defs/loop"}, "root": {"properties": {"a/b": schema}}}
    either = {"anyOf": [{"$ref": "#/$defs/either"}, {"type": "string"}]}
    lists = {"type": "array", "items": {"$ref": "#/$defs/lists"}}
    schema = {"$defs": {**defs, "either": either, "lists": lists}, "$ref": "#/$defs/root"}
    assert columns_of(schema) == (PropertyColumn("a/b", kind, is_list),)
    assert columns_of({"type": "array"}) == columns_of(None) == ()


def test_values_of_another_type_are_left_out() -> None:
    columns = columns_of(SCHEMA)
    for answer in ("no JSON", '{"stars": ', "[1]", None, [], ["5", "{}"]):
        assert values_of(columns, answer) == [None] * len(columns)
    assert values_of(columns[:1], ['{"stars": 4}', "x"]) == [4]
    assert [PropertyColumn("a", "integer").typed(value) for value in (3.0, 3.5, True, "3")] == [3] + [None] * 3
    assert PropertyColumn("a", "number").typed(10**400) is None
    assert PropertyColumn("a", "string", is_list=True).typed(["a", 1]) is None
    assert PropertyColumn("a", "string", is_list=True).typed(["a", None]) == ["a", None]
    assert PropertyColumn("a", "json").typed({"é": [1]}) == '{"é": [1]}'


def test_half_a_character_in_an_answer_can_be_written() -> None:
    columns = (PropertyColumn("a", "string"), PropertyColumn("b", "json"))
    text = r'{"a": "x\ud800y \uD83D\uDE00", "b": ["\udfff"]}'
    assert values_of(columns, text) == ["x?y \N{GRINNING FACE}", ["?"]]


def test_lines_without_a_form_are_never_asked_again() -> None:
    cut = {"choices": [{"text": "{", "finish_reason": "length"}]}
    plain, forms = InvalidAnswers(1, SamplingParams()), InvalidAnswers(1, {"schema": SCHEMA})
    assert plain.again(1, TEXT, {}, cut) is None
    assert plain.again(1, "/v1/embeddings", {"response_format": {"type": "json_object"}}, cut) is None
    assert plain.again(1, TEXT, {"response_format": {"type": "odd"}}, cut) is None
    assert forms.again(1, TEXT, {"response_format": {"type": "text"}}, cut) is None
    assert (
        forms.again(1, CHAT, {}, {"choices": [{"message": {"content": "[]"}}, {"message": {"content": None}}]}) is None
    )
    assert forms.again(2, CHAT, {}, {"choices": [{"message": {"content": "[]"}}, {"message": {"content": "["}}]}) == {}
    assert forms.settled(1, cut) is cut
    assert forms.again(3, TEXT, {"echo": True}, {"choices": [{"text": "Give JSON: {}"}]}) is None


def test_another_try_differs_from_the_last() -> None:
    cut, form = {"choices": [{"text": "{"}]}, {"response_format": {"type": "json_object"}}
    asked = InvalidAnswers(2, {})
    # An endpoint elsewhere gives 16 tokens to a completion that names no limit.
    assert asked.again(1, TEXT, form, cut) == {**form, "max_tokens": 32}
    assert asked.again(1, TEXT, form, cut) == {**form, "max_tokens": 64}
    # How many it gives to a chat is not known.
    chat, greedy = {"choices": [{"message": {"content": "{"}}]}, {**form, "temperature": 0, "seed": 1}
    assert asked.again(2, CHAT, form, chat) == form
    assert asked.again(3, CHAT, greedy, chat) is None
    assert marked_invalid(asked.settled(3, chat)) == 1
    assert InvalidAnswers(2, {"temperature": 0.0}).again(1, CHAT, form, chat) is None
    assert asked.again(4, TEXT, greedy, cut) == {**greedy, "max_tokens": 32, "seed": 2}
    last = {**form, "max_tokens": 5, "seed": 2**63 - 1}
    assert asked.again(5, TEXT, last, cut) == {**form, "max_tokens": 10, "seed": 0}
    most = {**form, "max_tokens": 2**30}
    assert asked.again(6, TEXT, most, cut) == {**form, "max_tokens": 2**31 - 1}


def test_null_stands_for_the_parameters_of_the_job_in_another_try() -> None:
    cut = {"choices": [{"text": "{"}]}
    body = {"response_format": {"type": "json_object"}, "max_tokens": None, "temperature": None, "seed": None}
    limited = InvalidAnswers(1, {"max_tokens": 5, "seed": 3})
    assert limited.again(1, TEXT, body, cut) == {**body, "max_tokens": 10, "seed": 4}
    assert InvalidAnswers(1, {}).again(1, TEXT, body, cut) == {**body, "max_tokens": 32}
    chat = {"choices": [{"message": {"content": "{"}}]}
    assert InvalidAnswers(1, {"temperature": 0.0}).again(1, CHAT, body, chat) is None


def response(*texts: str) -> dict[str, Any]:
    """An answer of `/v1/responses` with these texts, and a call of a tool."""
    said = [{"type": "message", "content": [{"type": "output_text", "text": text}]} for text in texts]
    return {"status": "completed", "output": [{"type": "reasoning", "summary": []}, *said, {"type": "function_call"}]}


def test_responses_that_are_no_json_are_asked_again() -> None:
    kind, body = "/v1/responses", {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 5}
    asked = InvalidAnswers(1, SamplingParams())
    assert asked.again(1, kind, body, response("{}")) is None
    assert asked.again(1, kind, body, response()) is None
    assert asked.again(1, kind, {"text": {"format": {"type": "text"}}}, response("{")) is None
    assert asked.again(1, kind, {"text": {"format": 5}}, response("{")) is None
    assert asked.again(1, kind, body, response("{}", "{")) == {**body, "max_output_tokens": 10}
    assert asked.again(1, kind, body, response("{")) is None
    settled = asked.settled(1, response("{"))
    assert answer_of({"body": settled}, None)[1].finish_reason == INVALID_JSON
    assert marked_invalid(settled) == 1
    mended = response("{}")
    asked.again(2, kind, body, response("{"))
    assert asked.settled(2, mended) is mended
    assert marked_invalid(mended) == 0
    defaults = InvalidAnswers(1, {"json_object": True, "max_tokens": 5})
    assert defaults.again(1, kind, {"text": None}, response("{")) == {"text": None, "max_output_tokens": 10}


@pytest.mark.parametrize(
    "content", [[{"type": "output_text"}], [{"type": "output_text", "text": 5}], 5, "text", {"type": "output_text"}]
)
def test_a_malformed_response_has_no_answer(content: object) -> None:
    body = {"status": "completed", "output": [{"type": "message", "content": content}]}
    kind, answer = answer_of({"body": body}, None)
    assert (kind, answer.answer, answer.finish_reason, answer.error) == (None, None, "stop", None)
    for whole in ([5, None, {"type": "reasoning"}], [{"type": "message", "content": [5, {"type": "refusal"}]}]):
        assert answer_of({"body": {"output": whole}}, None)[1].answer == whole


def test_labels_of_several_inputs_are_a_list() -> None:
    def said(*labels: object) -> tuple[object, object]:
        kind, answer = answer_of({"body": {"data": [{"label": label, "probs": [1.0]} for label in labels]}}, None)
        return kind, answer.answer

    assert said("good") == ("text", "good")
    assert said("good", "bad") == ("texts", ["good", "bad"])
    assert said("good", None) == ("other", ["good", None])
    assert said(None) == ("other", None)


def test_null_is_no_form_and_no_tool() -> None:
    defaults, null = {"json_object": True, "max_tokens": 5, "seed": 1}, {"response_format": None}
    filled = with_defaults({"messages": [], "tool_choice": None, **null}, defaults, chat=True)
    assert filled["response_format"] == {"type": "json_object"}
    assert (filled["seed"], filled["tool_choice"]) == (1, None)
    assert with_defaults({"seed": None}, defaults, chat=False)["seed"] is None  # as the endpoint understands it
    told = with_defaults({"input": "a", "text": None}, defaults, chat=False, responses=True)
    assert told["text"] == {"format": {"type": "json_object"}}
    read = read_generation({"messages": [{"role": "user", "content": "a"}], **null}, chat=True, defaults=defaults)
    assert read.is_constrained
    assert read_tools({"tools": None, "tool_choice": None, "parallel_tool_calls": None}) is None
    asked = InvalidAnswers(1, defaults)
    assert asked.again(1, CHAT, null, {"choices": [{"message": {"content": "["}}]}) is not None


def test_typed_columns_are_shown_once(tmp_path: Path) -> None:
    rows = tmp_path / "out.csv"
    rows.write_text('text,stars,answer,error,finish_reason\ngood,5,"{""stars"": 5}",,stop\nbad,,no,,length\n')
    good, bad = read_results(rows)
    assert (good.prompt, good.answer) == ("text: good", '{"stars": 5}')
    assert (bad.prompt, bad.answer) == ("text: bad", "no")


def test_a_type_of_any_value_is_no_schema() -> None:
    with pytest.raises(InvalidRequest, match=r"^schema=<class 'object'>: .* json_object=True is for any object$"):
        SamplingParams(schema=object)


def test_jobs_of_earlier_versions_go_on() -> None:
    given: Any = {"inputs": ("in.jsonl",), "output": "out.jsonl", "model": None}
    told = JobSpec(**given, defaults=SamplingParams()).parameters()
    assert not {*FORM_FIELDS, "prompt_logprobs_start"} & told.keys()
    assert told.get("prompt_logprobs") is told.get("classifiers") is None
    asked = JobSpec(**given, defaults=SamplingParams(prompt_logprobs=0, prompt_logprobs_start=3)).parameters()
    assert (asked["prompt_logprobs"], asked["prompt_logprobs_start"]) == (0, 3)


def test_a_bad_form_of_the_job_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="schema and choices"):
        run("in.jsonl", tmp_path / "out", defaults={"schema": {}, "choices": ["a"]})


_UNKEPT = [
    {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
    {"prompt": "a", "guided_regex": "("},
    {"custom_id": "r", "method": "POST", "url": "/v1/responses",
     "body": {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"uniqueItems": True}}}}},
]  # fmt: skip


def test_forms_that_no_model_can_keep_to_are_found_before_one_is_loaded(tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in _UNKEPT))
    planned = run(given, dry_run=True)
    assert (planned.total, planned.failed) == (3, 3)
    ran = run(given, tmp_path / "out.jsonl", model=str(tmp_path / "none"))
    told = [json.loads(line)["error"]["message"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ran.failed == 3
    assert [text.partition(":")[0] for text in told] == ["response_format", "guided_regex", "text.format"]
