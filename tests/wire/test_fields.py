"""The limit of an answer in a request body: whoever reads it finds the same one."""

from __future__ import annotations

from typing import Any

import pytest

from batchwright.inference.endpoint import answer_bound
from batchwright.inference.inference import Call
from batchwright.limiting.estimates import tokens_of_request
from batchwright.lines.forecast import allowed_tokens
from batchwright.wire.fields import limit_field, stated_limit
from batchwright.wire.requests import COMPLETION_URL


@pytest.mark.parametrize(
    ("body", "name", "limit"),
    [
        ({}, None, None),
        ({"max_tokens": None}, None, None),
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 0}, "max_tokens", 0),
        ({"max_completion_tokens": 7, "max_tokens": 5}, "max_completion_tokens", 7),
        ({"max_completion_tokens": None, "max_tokens": 5}, "max_tokens", 5),
        ({"max_output_tokens": 9}, "max_output_tokens", 9),
        ({"max_tokens": 10**20}, "max_tokens", 2**31 - 1),
        ({"max_tokens": "many"}, "max_tokens", None),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": True}, "max_tokens", None),
    ],
)
def test_the_limit_of_an_answer(body: dict[str, Any], name: str | None, limit: int | None) -> None:
    assert limit_field(body) == name
    assert stated_limit(body) == limit
    assert answer_bound(Call(COMPLETION_URL, {**body, "n": 2}, "r")) == (None if limit is None else 2 * limit)
    known = None if limit is None else max(1, limit)
    assert allowed_tokens(body, 64) == (known or 64)
    assert tokens_of_request(COMPLETION_URL, body) == (known or 256)
