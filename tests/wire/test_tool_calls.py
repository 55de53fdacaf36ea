"""Calls of tools and thoughts in generated text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.wire.tool_calls.formats import FORMATS, ThoughtMarks, ToolFormat, thought_marks, tool_format
from batchwright.wire.tool_calls.parser import AnswerForm
from batchwright.wire.tool_calls.pieces import Answer, Arguments, CallBegin, ToolCall

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "now": {},
}
BY_NAME: dict[str, ToolFormat] = {each.name: each for each in FORMATS}
THINK = ThoughtMarks("<think>", "</think>")


def form(name: str, **more: Any) -> AnswerForm:
    return AnswerForm(BY_NAME[name], TOOLS, **more)


def answer(name: str, text: str, **more: Any) -> Answer:
    """The parts of `text`, which are the same when it comes character by character."""
    whole = form(name, **more).parse(text)
    parser = form(name, **more).parser()
    assert Answer.of([*(piece for one in text for piece in parser.push(one)), *parser.finish()]) == whole
    return whole


WEATHER = ToolCall("weather", '{"city": "Paris", "days": 2}')
ADD = ToolCall("add", '{"a": 1, "b": 2}')


def as_json(call: ToolCall, key: str = "arguments") -> str:
    return f'{{"name": "{call.name}", "{key}": {call.arguments}}}'


def as_tags(call: ToolCall) -> str:
    values = json.loads(call.arguments)
    inner = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in values.items()
    )
    return f"<tool_call>\n<function={call.name}>\n{inner}</function>\n</tool_call>"


def as_python(call: ToolCall) -> str:
    values = json.loads(call.arguments)
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def written(name: str, calls: Sequence[ToolCall]) -> str:
    """The calls as a model of that format writes them."""
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in calls)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(map(as_json, calls))}]"
        case "llama":
            return "<|python_tag|>" + "; ".join(as_json(call, "parameters") for call in calls)
        case "qwen_coder":
            return "\n".join(map(as_tags, calls))
        case "pythonic":
            return f"[{', '.join(map(as_python, calls))}]"
        case "granite":
            return f"<|tool_call|>[{', '.join(map(as_json, calls))}]"
        case "deepseek":
            inner = (f"function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments}\n```" for call in calls)
            marked = "\n".join(f"<｜tool▁call▁begin｜>{each}<｜tool▁call▁end｜>" for each in inner)
            return f"<｜tool▁calls▁begin｜>{marked}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            marked = "".join(
                f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>" for call in calls
            )
            return f"<｜tool▁calls▁begin｜>{marked}<｜tool▁calls▁end｜>"
        case _:
            return f"[{','.join(map(as_json, calls))}]"


@pytest.mark.parametrize("name", BY_NAME)
def test_what_a_model_of_each_format_writes_becomes_calls(name: str) -> None:
    assert answer(name, written(name, [WEATHER, ADD])) == Answer("", "", [WEATHER, ADD])
    assert answer(name, written(name, [WEATHER]) + "\n") == Answer("", "", [WEATHER])


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama", "qwen_coder", "granite", "deepseek", "deepseek_v31"])
def test_what_stands_before_and_behind_calls_is_content(name: str) -> None:
    text = f"I look it up.\n\n{written(name, [WEATHER])}\nThere."
    assert answer(name, text) == Answer("I look it up.There.", "", [WEATHER])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
         [ToolCall("weather", '{"city": "Rome"}'), ToolCall("now", "{}")]),
        ("mistral", '[TOOL_CALLS]weather{"city": "Rome"}', [ToolCall("weather", '{"city": "Rome"}')]),
        ("llama", '{"name": "now", "parameters": {}}', [ToolCall("now", "{}")]),
        ("llama", '{"type": "function", "name": "now", "parameters": null}', [ToolCall("now", "{}")]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}', [ToolCall("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"}\\"}"}</tool_call>',
         [ToolCall("add", '{"a": "}"}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>\\"{"}}', [
            ToolCall("add", '{"a": "</tool_call>\\"{"}')]),
        ("qwen_coder", "<function=weather><parameter=city>\n12\n</parameter><parameter=days>12</parameter></function>",
         [ToolCall("weather", '{"city": "12", "days": 12}')]),
        ("qwen_coder", "<tool_call><function=now></function></tool_call>", [ToolCall("now", "{}")]),
        ("json", ' \n{"name": "add", "arguments": {"a": [{"b": 1}]}}', [ToolCall("add", '{"a": [{"b": 1}]}')]),
        ("granite", '<tool_call> [{"arguments": {"a": 1}, "name": "add"}]', [ToolCall("add", '{"a": 1}')]),
        ("deepseek", '<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>',
         [ToolCall("now", "{}")]),
        ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{} <｜tool▁call▁end｜>\n'
         '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": "}<｜tool▁call▁end｜>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n',
         [ToolCall("now", "{}"), ToolCall("add", '{"a": "}<｜tool▁call▁end｜>"}')]),
        ("pythonic", '<|python_start|>[now( ), weather(city = "Rome", days= 3,)]<|python_end|>',
         [ToolCall("now", "{}"), ToolCall("weather", '{"city": "Rome", "days": 3}')]),
        ("pythonic", "[ add(a='it\\'s \"x\", (1]', b={'c': [1.5, None], 'd': True}) ]\n",
         [ToolCall("add", '{"a": "it\'s \\"x\\", (1]", "b": {"c": [1.5, null], "d": true}}')]),
        ("pythonic", "[add(a=true, b=2024-01-01, a=3)]", [ToolCall("add", '{"a": true, "b": "2024-01-01"}')]),
        ("pythonic", r"[weather(city='\x41\u00e9\d\ud800', days=NaN)]",
         [ToolCall("weather", r'{"city": "A\u00e9\\d\ud800", "days": "NaN"}')]),
        ("pythonic", '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
         [ToolCall("add", '{"a": 1}'), ToolCall("now", "{}")]),
    ],
)  # fmt: skip
def test_variants_that_models_write_are_calls_too(name: str, text: str, calls: list[ToolCall]) -> None:
    assert answer(name, text) == Answer("", "", calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>\nnothing\n</tool_call>  \n"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "argu'),
        ("hermes", '{"name": "add", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("llama", '{"city": "Paris", "name": 5}'),
        ("llama", 'The call is {"name": "add", "parameters": {}}'),
        ("qwen_coder", "<tool_call><function=unknown>\n<parameter=a>1</parameter></function></tool_call>"),
        ("json", '[{"city": "Paris"}]'),
        ("granite", '[{"name": "add", "arguments": {}}]'),
        ("granite", '<|tool_call|>[{"name": "unknown", "arguments": {}}]'),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜>Well, <｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>unknown\n```json\n{}\n```"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁s"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[add(1, 2)]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[now"),
        ("pythonic", "[]"),
        ("pythonic", "Let me see: [now()]"),
        ("pythonic", "<|python_start|>print(1)<|python_end|>"),
        ("json", " [1, 2, 3] "),
        ("json", ""),
    ],
)
def test_what_is_no_call_of_a_tool_is_content_to_the_letter(name: str, text: str) -> None:
    assert answer(name, text) == Answer(text, "", [])


@pytest.mark.parametrize("name", ["llama", "json"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now"}',
        '{"name": "now", "mood": "calm"}',
        '{"name": "now", "arguments": null}',
        '{"name": "Ann", "arguments": {}}',
        '[{"city": "Paris"}, {"name": "now", "arguments": {}}]',
        '{"text": "<|python_tag|>{\\"name\\": \\"now\\", \\"arguments\\": {}}"}',
    ],
)
def test_an_answer_that_was_asked_to_be_json_is_no_call(name: str, text: str) -> None:
    assert answer(name, text, is_json=True) == Answer(text, "", [])


@pytest.mark.parametrize("name", BY_NAME)
def test_an_answer_that_was_asked_to_be_json_calls_what_it_names_with_its_arguments(name: str) -> None:
    text = as_json(WEATHER)
    bare = name in ("llama", "pythonic", "json")
    assert answer(name, text, is_json=True) == (Answer("", "", [WEATHER]) if bare else Answer(text))
    marked = json.dumps({"said": written(name, [WEATHER])})
    assert answer(name, marked, is_json=True) == Answer(marked)


def test_an_answer_that_ends_within_a_call_has_the_beginning_of_its_arguments() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Par'
    assert answer("hermes", text) == Answer("", "", [ToolCall("weather", '{"city": "Par')])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("pythonic", "[add(a=1, b=[2, ", Answer("", "", [ToolCall("add", '{"a": 1')])),
        ("pythonic", "[add(a=1), now(1)]", Answer(", now(1)]", "", [ToolCall("add", '{"a": 1}')])),
        ("pythonic", "[now()] So.", Answer("So.", "", [ToolCall("now", "{}")])),
        ("pythonic", "[now(), ", Answer(", ", "", [ToolCall("now", "{}")])),
        ("deepseek", written("deepseek", [ADD])[:-30] + "? That is 3.", Answer("<｜too? That is 3.", "", [ADD])),
    ],
)
def test_calls_are_followed_by_what_is_none(name: str, text: str, expected: Answer) -> None:
    assert answer(name, text) == expected


def test_a_call_that_is_followed_by_nonsense_stays_a_call_and_the_nonsense_content() -> None:
    text = f"<tool_call>{as_json(ADD)[:-1]}? That is 3.</tool_call>"
    assert answer("hermes", text) == Answer("? That is 3.</tool_call>", "", [ADD])


def test_a_marker_behind_one_that_begins_nothing_counts() -> None:
    text = f"<tool_call><tool_call>{as_json(ADD)}</tool_call>"
    assert answer("hermes", text) == Answer("<tool_call>", "", [ADD])


def test_only_the_first_call_counts_where_several_are_not_wanted() -> None:
    assert answer("hermes", written("hermes", [WEATHER, ADD]), parallel=False) == Answer("", "", [WEATHER])


def test_without_tools_all_text_is_content() -> None:
    text = written("hermes", [WEATHER])
    assert AnswerForm(BY_NAME["hermes"], {}).parse(text) == Answer(text)
    assert AnswerForm().parse(text) == Answer(text)


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = form("hermes").parser()
    assert parser.push('Yes. <tool_call>{"name": "add", "arguments": {"a"')[1:] == [
        CallBegin(0, "add"), Arguments(0, '{"a"'),
    ]  # fmt: skip
    assert parser.push(": 1") == [Arguments(0, ": 1")]
    assert parser.push("}") == [Arguments(0, "}")]
    assert parser.push("}</tool_call>") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("text", "in_thought", "thought", "content"),
    [
        ("<think>\nHm, well.\n</think>\n\nYes.", False, "Hm, well.", "Yes."),
        ("Hm, well.\n</think>\n\nYes.", True, "Hm, well.", "Yes."),
        ("<think>Hm, well.</think>Yes.", True, "Hm, well.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>\nHm, w", False, "Hm, w", ""),
        ("Hm, </thi", True, "Hm, </thi", ""),
        ("Hm <think> </think>", False, "", "Hm <think> </think>"),
        ("<thi", False, "", "<thi"),
        (" \nYes. ", False, "", " \nYes. "),
        ("<think>a</think>b</think>", False, "a", "b</think>"),
    ],
)
def test_a_thought_at_the_beginning_is_split_off(text: str, in_thought: bool, thought: str, content: str) -> None:
    assert answer("hermes", text, thought=THINK, in_thought=in_thought) == Answer(content, thought)


def test_calls_that_a_model_only_thinks_about_are_none() -> None:
    text = f"<think>Perhaps {written('hermes', [ADD])}?</think>{written('hermes', [WEATHER])}"
    assert answer("hermes", text, thought=THINK).calls == [WEATHER]


def test_formats_are_recognized_by_what_templates_write() -> None:
    assert tool_format('… {{\'<tool_call>\\n{"name": …').name == "hermes"
    assert tool_format("<tool_call>\\n<function=' + tool_call.name").name == "qwen_coder"
    assert tool_format("{{- '[TOOL_CALLS]' }}").name == "mistral"
    assert tool_format('format {"name": function name, "parameters": dictionary of argument name …').name == "llama"
    assert tool_format("{% for tool in tools %}").name == "json"
    assert tool_format("Use exact format: [func_name1(param1=value1, param2=value2), …]").name == "pythonic"
    assert tool_format("respond with <|tool_call|> followed by a JSON list of tools").name == "granite"
    assert tool_format("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' … '\\n' + '```json' + '\\n'").name == "deepseek"
    assert tool_format("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>").name == "deepseek_v31"
    assert thought_marks("{% if '</think>' in content %}") == THINK
    assert thought_marks("[THINK]…[/THINK]") == ThoughtMarks("[THINK]", "[/THINK]")
    assert thought_marks("hello") is None


_FRAGMENTS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<function=", ">",
    "add>", "<parameter=", "a>", "</parameter>", "</function>", "<think>", "</think>", "[", "]", "{", "}", ",", ";",
    " ", "\n", '"', "\\", ":", '"name"', '"arguments"', '"add"', '{"name": "add", "arguments": ', "1", "null", "é",
    "add", as_json(ADD), as_json(WEATHER, "parameters"), as_tags(WEATHER), written("hermes", [ADD]),
    written("mistral", [ADD]), "<|tool_call|>", written("granite", [ADD]), "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "function", "```json",
    "```",
    written("deepseek", [ADD, WEATHER]), written("deepseek_v31", [ADD]), "<|python_start|>", "<|python_end|>",
    "add(", "(", ")", "a=", "'", "=", written("pythonic", [WEATHER, ADD]),
])  # fmt: skip
_TEXTS = st.lists(_FRAGMENTS, max_size=14).map("".join)
_FORMS = st.builds(
    AnswerForm,
    st.sampled_from(FORMATS),
    st.just(TOOLS),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, THINK]),
    st.booleans(),
)


@given(_FORMS, _TEXTS, st.lists(st.integers(0, 300)))
def test_however_a_text_is_cut_it_means_the_same(form: AnswerForm, text: str, cuts: list[int]) -> None:
    parser, pieces = form.parser(), []
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(edges):
        pieces += parser.push(text[start:end])
    pieces += parser.finish()
    assert Answer.of(pieces) == form.parse(text)
    begun = [piece.call for piece in pieces if isinstance(piece, CallBegin)]
    assert begun == list(range(len(begun)))
    assert all(piece.call in begun for piece in pieces if isinstance(piece, Arguments))


@given(st.sampled_from(FORMATS), _TEXTS)
def test_a_text_without_calls_is_content_to_the_letter(format_: ToolFormat, text: str) -> None:
    found = AnswerForm(format_, TOOLS).parse(text)
    if not found.calls:
        assert found.content == text


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_CALLS = st.lists(
    st.builds(lambda name, values: ToolCall(name, json.dumps(values)), st.sampled_from(sorted(TOOLS)),
              st.dictionaries(st.text(), _VALUES, max_size=4)), min_size=1, max_size=3)  # fmt: skip


@given(st.sampled_from(["hermes", "mistral", "llama", "json", "granite", "deepseek", "deepseek_v31"]), _CALLS)
def test_calls_with_any_arguments_are_found(name: str, calls: list[ToolCall]) -> None:
    assert form(name).parse(written(name, calls)) == Answer("", "", calls)


_NAMED_VALUES = st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), _VALUES, max_size=4)


@given(st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), _NAMED_VALUES), min_size=1, max_size=3))
def test_arguments_as_python_writes_them_are_read(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = written("pythonic", [ToolCall(name, json.dumps(values)) for name, values in calls])
    found = form("pythonic").parse(text)
    assert (found.content, found.thought) == ("", "")
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
