"""Grammars of calls: what llguidance lets through is what the parser takes for a call."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import InvalidRequest
from batchwright.wire.tool_calls.formats import FORMATS, ThoughtMarks, ToolFormat
from batchwright.wire.tool_calls.grammar import call_grammar, lazy_call_grammar
from batchwright.wire.tool_calls.parser import AnswerForm

from .chat_models import DEEPSEEK, GRANITE, MISTRAL, THINKING, chat_model

llguidance: Any = pytest.importorskip("llguidance")
hf: Any = pytest.importorskip("llguidance.hf")

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"type": "integer", "minimum": 1, "maximum": 30}},
        "required": ["unit"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["°C", "°F"]}},
    },
    "warn": {"properties": {"loud": {"type": "boolean"}}, "required": ["loud"], "additionalProperties": False},
}
BY_NAME: dict[str, ToolFormat] = {each.name: each for each in FORMATS}
THINK = ThoughtMarks("<think>", "</think>")
RIGHT = '{"unit": "°C", "days": 3}'


class Vocabulary:
    """A vocabulary of bytes, with or without tokens for the markers of a template."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.guide = llguidance.LLTokenizer("byte") if tokenizer is None else hf.from_tokenizer(tokenizer._inner)
        self.tokens = {} if tokenizer is None else tokenizer.markers
        self.encode: Any = (lambda text: [*text.encode()]) if tokenizer is None else tokenizer.encode
        self.decode: Any = (lambda ids: bytes(ids).decode(errors="ignore")) if tokenizer is None else tokenizer.decode
        self.ends = {self.guide.eos_token}

    def matcher(self, name: str, **more: Any) -> Any:
        made: Any = lazy_call_grammar if "strict" in more else call_grammar
        grammar = made(BY_NAME[name], TOOLS, tokens=self.tokens, **more)
        assert llguidance.LLMatcher.validate_grammar(grammar, self.guide) == ""
        return llguidance.LLMatcher(self.guide, grammar)

    def letters(self, text: str) -> list[int]:
        """The text in single letters, also of the markers."""
        return [token for letter in text for token in self.encode(letter)]

    def accepted(self, ids: list[int], name: str, **more: Any) -> int:
        return int(self.matcher(name, **more).validate_tokens(ids))

    def accepts(self, name: str, text: str, **more: Any) -> bool:
        matcher, ids = self.matcher(name, **more), self.encode(text) if text else []
        passes = matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
        return bool(passes)

    def drawn(self, draw: random.Random, name: str, **more: Any) -> str | None:
        """A text that the grammar lets through, as a model of random weights writes it; None if it does not end."""
        matcher = self.matcher(name, **more)
        ids: list[int] = []
        while len(ids) < 600:
            mask = matcher.compute_logit_bias()
            allowed = [token for token, bias in enumerate(mask) if bias]
            if matcher.is_accepting() and (draw.random() < 0.3 or matcher.is_stopped()):
                return str(self.decode(ids))
            if matcher.is_stopped():
                break
            token = draw.choice([each for each in allowed if each not in self.ends] or allowed)
            if not matcher.consume_token(token):
                raise AssertionError(matcher.get_error())
            ids.append(token)
        return None


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    def of(name: str, template: str) -> Vocabulary:
        folder: Path = tmp_path_factory.mktemp(name)
        return Vocabulary(Tokenizer(chat_model(folder, template), 1000))

    templates = {"hermes": THINKING, "mistral": MISTRAL, "granite": GRANITE, "deepseek": DEEPSEEK}
    return {"bytes": Vocabulary(None), **{name: of(name, template) for name, template in templates.items()}}


_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CASES: list[tuple[str, str, str]] = [
    ("hermes", "hermes", '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'),
    ("bytes", "hermes", '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'),
    ("mistral", "mistral", "[TOOL_CALLS]weather[ARGS]%s"),
    ("bytes", "mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": %s}]'),
    ("bytes", "llama", '{"name": "weather", "parameters": %s}'),
    ("bytes", "json", '{"name": "weather", "arguments": %s}'),
    ("bytes", "pythonic", '{"name": "weather", "parameters": %s}'),
    ("granite", "granite", '<|tool_call|>[{"name": "weather", "arguments": %s}]'),
    ("bytes", "granite", '<|tool_call|>[{"name": "weather", "arguments": %s}]'),
    ("deepseek", "deepseek", _DEEPSEEK % "function<｜tool▁sep｜>weather\n```json\n%s\n```"),
    ("bytes", "deepseek", _DEEPSEEK % "function<｜tool▁sep｜>weather\n```json\n%s\n```"),
    ("deepseek", "deepseek_v31", _DEEPSEEK % "weather<｜tool▁sep｜>%s"),
    ("bytes", "deepseek_v31", _DEEPSEEK % "weather<｜tool▁sep｜>%s"),
]


@pytest.mark.parametrize(("vocabulary", "name", "text"), CASES)
def test_right_calls_pass_and_wrong_ones_do_not(
    vocabularies: dict[str, Vocabulary], vocabulary: str, name: str, text: str
) -> None:
    given = vocabularies[vocabulary]
    assert given.accepts(name, text % RIGHT)
    assert given.accepts(name, text % RIGHT, named="weather")
    assert not given.accepts(name, text % RIGHT, named="warn")
    assert not given.accepts(name, text % RIGHT.replace("°C", "K"))
    assert not given.accepts(name, text % '{"days": 3}')
    assert not given.accepts(name, text % '{"unit":"°C"    }')
    assert not given.accepts(name, (text % RIGHT).replace("weather", "whether"))
    assert not given.accepts(name, "It rains.")
    joint = {"hermes": "\n", "llama": "; ", "pythonic": "; ", "json": "\n"}.get(name, "")
    several = joint.join([text % RIGHT] * 2)
    if vocabulary == "bytes" and name == "mistral":
        several = several.replace("][TOOL_CALLS] [", ", ")
    between = "\n" if name == "deepseek" else ""
    several = several.replace("]<|tool_call|>[", ", ")
    several = several.replace("<｜tool▁calls▁end｜><｜tool▁calls▁begin｜>", between)
    assert given.accepts(name, several)
    assert not given.accepts(name, several, parallel=False)
    assert not given.accepts(name, several, named="weather")


@pytest.mark.parametrize("vocabulary", ["hermes", "bytes"])
def test_a_model_may_think_before_it_calls(vocabularies: dict[str, Vocabulary], vocabulary: str) -> None:
    given, call = vocabularies[vocabulary], '<tool_call>\n{"name": "warn", "arguments": {"loud": true}}\n</tool_call>'
    assert given.accepts("hermes", f"<think>\nHm, {{.\n</think>\n\n{call}", thought=THINK)
    assert given.accepts("hermes", call, thought=THINK)
    assert given.accepts("hermes", f"Hm.</think>{call}", thought=THINK, in_thought=True)
    assert not given.accepts("hermes", call, thought=THINK, in_thought=True)
    assert not given.accepts("hermes", "<think>Hm.</think>Yes.", thought=THINK)
    letters = given.letters(f"Hm.</think>Yes.</think>{call}") if vocabulary == "hermes" else []
    assert given.accepted(letters, "hermes", thought=THINK, in_thought=True) < len("Hm.</think>Y")


@pytest.mark.parametrize(("vocabulary", "name"), [case[:2] for case in CASES])
def test_whatever_passes_is_a_call_with_arguments_as_the_schema_says(
    vocabularies: dict[str, Vocabulary], vocabulary: str, name: str
) -> None:
    draw, found = random.Random(7), 0
    for _ in range(60):
        parallel = draw.random() < 0.5
        text = vocabularies[vocabulary].drawn(draw, name, parallel=parallel)
        if text is None:
            continue
        answer = AnswerForm(BY_NAME[name], TOOLS).parse(text)
        assert answer.content == ""
        assert answer.calls, text
        assert parallel or len(answer.calls) == 1
        for call in answer.calls:
            jsonschema_rs.validate(TOOLS[call.name], json.loads(call.arguments))
            found += 1
    assert found > 20


def test_arguments_in_plain_text_cannot_be_held_to_a_schema() -> None:
    with pytest.raises(InvalidRequest, match="plain text"):
        call_grammar(BY_NAME["qwen_coder"], TOOLS, tokens={})


LAZY = [
    case for case in CASES
    if case[1] in ("hermes", "mistral", "deepseek", "deepseek_v31") or case[:2] == ("granite", "granite")
]  # fmt: skip


@pytest.mark.parametrize(("vocabulary", "name", "text"), LAZY)
def test_a_call_that_begins_by_itself_is_right_and_all_else_is_free(
    vocabularies: dict[str, Vocabulary], vocabulary: str, name: str, text: str
) -> None:
    given, strict = vocabularies[vocabulary], {"strict": {"weather"}}
    for free in ("", "It rains.", "Look: {}\n\n<tool [ ]", "a" * 500):
        assert given.accepts(name, free, **strict)
        assert given.accepts(name, free + text % RIGHT, **strict)
        assert not given.accepts(name, free + text % '{"days": 3}', **strict)
        assert not given.accepts(name, (free + text % RIGHT).replace("weather", "whether"), **strict)
    loose = (text % '{"any": [1, {}]}').replace("weather", "warn")
    assert given.accepts(name, loose, **strict)
    assert not given.accepts(name, loose, strict={"weather", "warn"})
    right = text % RIGHT
    assert given.accepts(name, f"Well. {right}\nAnd {right} so.", **strict)
    assert not given.accepts(name, f"Well. {right}\nAnd {right} so.", parallel=False, **strict)
    letters = given.letters("So " + text % '{"days": 3}')
    assert given.accepted(letters, name, **strict) < len(letters)


@pytest.mark.parametrize("vocabulary", ["hermes", "bytes"])
def test_a_thought_may_come_before_what_is_free(vocabularies: dict[str, Vocabulary], vocabulary: str) -> None:
    given, call = vocabularies[vocabulary], CASES[0][2] % RIGHT
    strict = {"strict": {"weather"}, "thought": THINK}
    assert given.accepts("hermes", f"<think>Hm.</think>\n\nYes. {call}", **strict)
    assert given.accepts("hermes", f"Yes. {call}", **strict)
    assert given.accepts("hermes", f"Hm.</think>Yes. {call}", in_thought=True, **strict)
    assert not given.accepts("hermes", "Hm.</think>" + call.replace("°C", "K"), in_thought=True, **strict)


def test_formats_without_certain_markers_are_not_held() -> None:
    for name in ("llama", "json", "qwen_coder", "pythonic", "granite"):
        assert lazy_call_grammar(BY_NAME[name], TOOLS, strict={"weather"}, tokens={}) is None
