"""The shape of a JSON text is that of the value it stands for, wherever the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InvalidRequest
from batchwright.wire import json_bounds
from batchwright.wire.json_bounds import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_FIELDS,
    MAX_VALUES,
    JsonScan,
    JsonShape,
)

_TEXTS = st.text(alphabet='ab\\"[]{},:\n☃')
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=20,
)


def _shape(value: Any) -> JsonShape:
    """That of the text of a value, found by looking at the value."""
    if not isinstance(value, (list, dict)):
        return JsonShape()
    inner = [_shape(each) for each in (value.values() if isinstance(value, dict) else value)]
    return JsonShape(
        values=1 + (sum(each.values for each in inner) or 1),
        containers=1 + sum(each.containers for each in inner),
        fields=(len(value) if isinstance(value, dict) else 0) + sum(each.fields for each in inner),
        depth=1 + max((each.depth for each in inner), default=0),
    )


def _scanned(text: bytes, size: int | None = None) -> JsonScan:
    """Fed with pieces of `size` bytes."""
    scan = JsonScan()
    for start in range(0, len(text), size or len(text)):
        scan.feed(text[start : start + (size or len(text))])
    return scan


@given(_VALUES, st.booleans())
def test_it_is_that_of_the_value(value: Any, spaced: bool) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2 if spaced else None).encode()
    assert _scanned(text).shape == _shape(value)


@given(_VALUES, st.integers(1, 5))
def test_it_does_not_depend_on_where_the_text_is_cut(value: Any, size: int) -> None:
    text = json.dumps(value).encode()
    whole = _shape(value)
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("VALUES", "CONTAINERS", "FIELDS", "DEPTH"):
            patch.setattr(json_bounds, f"MAX_{limit}", getattr(whole, limit.lower()))
        assert _scanned(text, size).shape == whole
        patch.setattr(json_bounds, "MAX_VALUES", whole.values - 1)
        with pytest.raises(InvalidRequest, match="values"):
            _scanned(text, size)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"[" * (MAX_DEPTH + 1), "levels"),
        (b'{"a":' * (MAX_DEPTH + 1), "levels"),
        (b"[" + b"{}," * MAX_CONTAINERS + b"0]", "arrays and objects"),
        (b"[" + b"0," * MAX_VALUES + b"0]", "values"),
        (b"{" + b'"a":0,' * MAX_FIELDS + b'"a":0}', "fields"),
    ],
)
def test_too_much_of_anything_is_refused_by_name(text: bytes, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as caught:
        _scanned(text)
    assert caught.value.code == "json_too_complex"


def test_a_text_may_be_as_long_as_it_likes() -> None:
    _scanned(b'["' + b"[,{" * 1_000_000 + b'"]')
    _scanned(b"[" + b" " * 1_000_000 + b"]")
