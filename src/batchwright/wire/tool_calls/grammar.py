"""Grammars of answers that call tools correctly, or think before they take a form, in the Lark of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from batchwright.errors import InvalidRequest
from batchwright.schemas import UnkeptSchema, kept
from batchwright.wire.tool_calls.formats import ThoughtMarks, ToolFormat
from batchwright.wire.tool_calls.sections import Tools

_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""White space as models were trained on it, and no more; what a schema says is enforced or refused."""
_WITH_PARAMETERS = ("llama", "pythonic")
"""Formats whose arguments are called parameters. Written as in Python they cannot be held to a schema, as JSON they
can."""
_TEXT = r"/(.|\n)*/"
_SPACE = r"/\n{0,2}/"
"""White space after a thought."""


def call_grammar(
    form: ToolFormat,
    tools: Tools,
    *,
    named: str | None = None,
    parallel: bool = True,
    tokens: Mapping[str, int],
    thought: ThoughtMarks | None = None,
    in_thought: bool = False,
) -> str:
    """Return the grammar of answers that call a tool, or several if `parallel`, with arguments as their schemas say.

    With `named`, only that tool is called, once. `tokens` has the ids of the markers that are single tokens. With
    `thought`, the model may think before it calls; `in_thought` is as in `AnswerForm`.

    Raises `InvalidRequest` for a schema that cannot be enforced, and if the format writes arguments as plain text,
    which no schema constrains.
    """
    if form.name == "qwen_coder":
        raise InvalidRequest(
            "tool_choice: this model writes arguments as plain text, which cannot be held to a schema: use auto",
            param="tool_choice",
            code="unsupported_parameter",
        )
    several = parallel and named is None
    names = [*tools] if named is None else [named]
    rules = [
        f"start: {_thought(thought, tokens, in_thought=in_thought)}calls",
        *_calls(form, tokens, several=several),
        *_named_calls(form, {name: tools[name] for name in names}, tokens),
    ]
    if thought is not None:
        rules += _thought_rules(thought, tokens)
    return "\n".join(rules) + "\n"


def lazy_call_grammar(
    form: ToolFormat,
    tools: Tools,
    *,
    strict: Collection[str],
    parallel: bool = True,
    tokens: Mapping[str, int],
    thought: ThoughtMarks | None = None,
    in_thought: bool = False,
) -> str | None:
    """Return the grammar of answers that are any text until a marker begins a call, which must then call a tool.

    Arguments of the tools that `strict` names are as their schemas say, those of others are any JSON object. All else
    is as in `call_grammar`. None if calls of the format cannot be distinguished from text by their markers, or cannot
    be held to a schema.
    """
    if not form.openings or form.at_start or form.name == "qwen_coder":
        return None
    opening, repeat = form.openings[0], "*" if parallel else "?"
    if opening not in tokens and len(form.openings) > 1:
        return None  # free text could begin a call with another marker
    before = _thought(thought, tokens, in_thought=in_thought)
    if opening in tokens:
        start = [f"start: {before}FREE (calls FREE){repeat}"]
    else:
        start = [f"start: {before}(opened calls){repeat} FREE", f"opened[suffix={json.dumps(opening)}]: {_TEXT}"]
    held = {name: schema if name in strict else {} for name, schema in tools.items()}
    rules = [
        *start,
        # The marker also begins a call if the model writes it in several tokens.
        f"FREE: {_text_without(*form.openings)}",
        *_calls(form, tokens, several=parallel and form.name != "hermes" and "[ARGS]" not in tokens, is_open=True),
        *_named_calls(form, held, tokens),
        *([] if thought is None else _thought_rules(thought, tokens)),
    ]
    return "\n".join(rules) + "\n"


def thought_grammar(thought: ThoughtMarks, tokens: Mapping[str, int], *, in_thought: bool) -> str:
    """Return the grammar of answers that may think before the rule `@answer`; arguments as for `call_grammar`."""
    start = f"start: {_thought(thought, tokens, in_thought=in_thought)}@answer"
    return "\n".join([start, *_thought_rules(thought, tokens)]) + "\n"


def _named_calls(form: ToolFormat, tools: Tools, tokens: Mapping[str, int]) -> Sequence[str]:
    """Return the rules of a call of each tool."""
    rules = [f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}"]
    for place, (name, schema) in enumerate(tools.items()):
        begin, end = _around(form, name, tokens)
        rules.append(f"call_{place}: {begin} args_{place}{end}")
        rules.append(f"args_{place}: %json {json.dumps(_arguments(name, schema))}")
    return rules


def _calls(form: ToolFormat, tokens: Mapping[str, int], *, several: bool, is_open: bool = False) -> Sequence[str]:
    """Return the rules of consecutive calls. `is_open`: whether a marker that is not a token has opened the first."""
    opening = _marker(form.openings[0], tokens) if form.openings else ""
    if is_open and form.openings[0] not in tokens:
        opening = ""
    match form.name:
        case "hermes":
            one, between = f'{opening} "\\n" call "\\n" {_marker(form.closing, tokens)}', '"\\n"'
        case "mistral" if "[ARGS]" in tokens:
            one, between = f"{opening} call", ""
        case "mistral" | "granite":
            inner = 'call (", " call)*' if several else "call"
            return [f'calls: {opening} "{" [" if form.name == "mistral" else "["}" {inner} "]"']
        case _ if form.marks is not None:
            separator = '"\\n"' if form.marks.kind else ""
            inner = f"call ({separator} call)*" if several else "call"
            return [f"calls: {opening} {inner} {_marker(form.marks.section_end, tokens)}"]
        case _:
            one, between = "call", '"; "' if form.name in _WITH_PARAMETERS else '"\\n"'
    return [f"calls: marked ({between} marked)*" if several else "calls: marked", f"marked: {one}"]


def _around(form: ToolFormat, name: str, tokens: Mapping[str, int]) -> tuple[str, str]:
    """Return what comes before and after the arguments of a call."""
    if form.name == "mistral" and "[ARGS]" in tokens:
        return f"{json.dumps(name)} {_marker('[ARGS]', tokens)}", ""
    if form.marks is not None:
        begin, middle, end = (_marker(each, tokens) for each in (form.marks.begin, form.marks.middle, form.marks.end))
        if form.marks.kind:
            fenced = json.dumps(f"{name}\n```json\n")
            return f"{begin} {json.dumps(form.marks.kind)} {middle} {fenced}", f' "\\n```" {end}'
        return f"{begin} {json.dumps(name)} {middle}", f" {end}"
    key = "parameters" if form.name in _WITH_PARAMETERS else "arguments"
    return json.dumps(f'{{"name": {json.dumps(name)}, "{key}": '), ' "}"'


def _arguments(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return {**kept(schema), "type": "object", "x-guidance": _JSON}
    except UnkeptSchema as error:
        raise InvalidRequest(f"tools: the parameters of {name}: {error}", param="tools") from error


def _thought(thought: ThoughtMarks | None, tokens: Mapping[str, int], *, in_thought: bool) -> str:
    if thought is None:
        return ""
    return "thought " if in_thought else f"({_marker(thought.opening, tokens)} thought)? "


def _thought_rules(thought: ThoughtMarks, tokens: Mapping[str, int]) -> Sequence[str]:
    if thought.closing in tokens:
        # The mark also ends the thought if the model writes it in several tokens.
        rule = f"thought: THINKING {_marker(thought.closing, tokens)} {_SPACE}"
        return [rule, f"THINKING: {_text_without(thought.closing)}"]
    return [f"thought: thinking {_SPACE}", f"thinking[suffix={json.dumps(thought.closing)}]: {_TEXT}"]


def _text_without(*parts: str) -> str:
    """Return the terminal for all texts that contain none of `parts`."""
    named = "|".join(re.escape(part).replace("/", r"\/") for part in parts)
    return rf"{_TEXT} & ~/(.|\n)*({named})(.|\n)*/"


def _marker(text: str, tokens: Mapping[str, int]) -> str:
    return f"<[{tokens[text]}]>" if text in tokens else json.dumps(text)
