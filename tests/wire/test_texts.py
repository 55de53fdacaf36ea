"""Halves of surrogate pairs, wherever in a body they stand."""

from __future__ import annotations

from typing import Any

import pytest

from batchwright.errors import InvalidRequest
from batchwright.wire.texts import require_texts

HALF = "a\ud800"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": HALF}, "prompt"),
        ({"prompt": ["ok", HALF]}, "prompt[1]"),
        ({"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}, "messages[0].content[0].text"),
        ({"prompt": "ok", "stop": [HALF]}, "stop[0]"),
        ({"metadata": {"\udfff": HALF}}, "metadata.?"),
    ],
)
def test_one_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=r"character 1 is half of a surrogate pair") as caught:
        require_texts(body)
    assert caught.value.param == param


def test_texts_pass_and_depth_is_no_matter() -> None:
    deep: list[Any] = ["Grüße \U0001f600"]
    for _ in range(10_000):
        deep = [deep]
    require_texts({"prompt": deep, "n": 1, "stop": None, "user": "x"})
