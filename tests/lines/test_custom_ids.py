"""Ids are unique, and duplicates are found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InputError
from batchwright.lines.custom_ids import IdTable


@given(st.lists(st.none() | st.sampled_from(["a", "b", "line-1", "line-3", "line-3~", "line-5"]), max_size=12))
def test_no_name_is_given_twice(wanted: list[str | None]) -> None:
    table = IdTable(len(wanted))
    names, taken = [], set()
    for line, custom_id in enumerate(wanted, start=1):
        name, error = table.assign(line, custom_id)
        asked = f"line-{line}" if custom_id is None else custom_id
        assert (error is not None) == (asked in taken)
        assert (name == asked) == (error is None)
        taken.add(name)
        names.append(name)
    assert len(set(names)) == len(names)


def test_the_error_names_the_id_and_the_line_that_has_it() -> None:
    table = IdTable(2)
    assert table.assign(4, "a") == ("a", None)
    name, error = table.assign(9, "a")
    assert name == "line-9"
    assert error is not None
    assert str(error) == "This custom_id is already used on line 4: give each line its own."
    with pytest.raises(InputError, match="more lines"):
        table.assign(10, "b")


def test_against_a_set() -> None:
    table = IdTable(5000)
    for line in range(1, 5001):
        assert table.claim(f"id {line}", line) is None
    assert all(table.claim(f"id {line}", 6000) == line for line in range(1, 5001))
