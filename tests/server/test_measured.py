"""What is taken for the first and last text of a stream."""

from __future__ import annotations

from typing import Any

import pytest

from batchwright.service.observability.measured import _has_text

CALL = {"index": 0, "function": {"arguments": "{"}}


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({}, False),
        ({"content": "a"}, True),
        ({"reasoning_content": "a"}, True),
        ({"tool_calls": [CALL]}, True),
    ],
)
def test_thoughts_and_calls_are_generated_text(delta: dict[str, Any], expected: bool) -> None:
    assert _has_text({"choices": [{"index": 0, "delta": delta}]}) is expected
