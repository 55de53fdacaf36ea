"""What a chat says beside its messages: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from batchwright.errors import InvalidRequest
from batchwright.wire.chats import Chat
from batchwright.wire.requests import read_generation

MESSAGES = [{"role": "user", "content": "Hello"}]


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def read(**body: Any) -> tuple[Any, Chat]:
    """The tools and the prompt of a chat."""
    found = read_generation({"messages": MESSAGES, **body}, chat=True)
    (prompt,) = found.prompts
    assert isinstance(prompt, Chat)
    return found.tools, prompt


def test_tools_are_for_the_template_and_their_schemas_for_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = [tool("f", parameters=schema, strict=True, description="d"), tool("g")]
    tools, prompt = read(tools=given)
    assert (tools.schemas, tools.choice, tools.named, tools.parallel) == ({"f": schema, "g": {}}, "auto", None, True)
    assert list(prompt.tools) == given
    tools, prompt = read(tools=given, tool_choice="none", parallel_tool_calls=False)
    assert (tools.choice, tools.parallel, prompt.tools) == ("none", False, ())


def test_a_call_may_be_required_of_any_tool_or_of_one() -> None:
    tools, _ = read(tools=[tool("f"), tool("g")], tool_choice="required")
    assert (tools.choice, tools.named) == ("required", None)
    tools, _ = read(tools=[tool("f"), tool("g")], tool_choice=tool("g"))
    assert (tools.choice, tools.named) == ("required", "g")


def test_a_chat_without_tools_has_none() -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"parallel_tool_calls": True},
    ]
    for body in bodies:
        tools, prompt = read(**body)
        assert (tools, prompt.tools, prompt, prompt.options, prompt.effort) == (None, (), MESSAGES, {}, None)


def test_how_to_think_is_for_the_template() -> None:
    _, prompt = read(reasoning_effort="low", chat_template_kwargs={"enable_thinking": True, "thinking_budget": 5})
    assert (prompt.effort, prompt.options) == ("low", {"enable_thinking": True, "thinking_budget": 5})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("{", "{"), ("[1]", "[1]")],
)
def test_arguments_of_earlier_calls_are_objects_for_the_template(arguments: Any, told: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    _, prompt = read(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    assert prompt[1]["tool_calls"] == [{**call, "function": {"name": "f", "arguments": told}}]
    assert prompt[1]["content"] == ""


@pytest.mark.parametrize("calls", [None, []])
def test_templates_see_no_fields_that_say_nothing(calls: Any) -> None:
    message = {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": calls, "reasoning_content": "Hm."}
    _, prompt = read(messages=[*MESSAGES, message])
    assert prompt[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


_DEEP: dict[str, Any] = {}
for _ in range(300):
    _DEEP = {"properties": {"a": _DEEP}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool(), tool("")]}, "tools[1].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(parameters=_DEEP)]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict=1)]}, "tools[0].function.strict"),
        ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": tool("g")}, "tool_choice.function.name"),
        ({"tools": [tool()], "tool_choice": tool(["f"])}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"thinking_budget": True}}, "chat_template_kwargs.thinking_budget"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [tool(arguments=5)]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_a_chat_cannot_say(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"])
def test_a_completion_has_none_of_it(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_generation({"prompt": "a", name: [{}]}, chat=False)
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
