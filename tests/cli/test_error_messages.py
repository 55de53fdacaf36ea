"""How the command line words errors of the Python interface."""

from __future__ import annotations

import pytest

from batchwright.cli.main import with_flags_named


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("rpm=-1.0: must be above 0", "--rpm -1.0: must be above 0"),
        (
            "deadline='3x' with via='live': at once",
            "--deadline '3x' with --via 'live': at once",
        ),
        ("line 3: rpm=5 is in the body", "line 3: rpm=5 is in the body"),
        ("colour=1: there is no such flag", "colour=1: there is no such flag"),
    ],
)
def test_settings_are_named_as_flags(message: str, shown: str) -> None:
    assert with_flags_named(message, ["run", "in.jsonl", "-o", "out.jsonl"]) == shown


def test_the_flags_are_those_of_the_command() -> None:
    assert with_flags_named("replicas=0: at least 1", ["run"]) == "--replicas 0: at least 1"
    assert with_flags_named("replicas=0: at least 1", ["models", "list"]) == "replicas=0: at least 1"
