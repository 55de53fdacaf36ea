"""`--reorder-fields`: prompts with the same lines in another order, by what rows share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.jobs.fakes import FakeEngine
from typer.testing import CliRunner

from batchwright import run
from batchwright.cli.main import app
from batchwright.errors import InputError, ResumeRefused

TEMPLATE = "Judge.\n\nReview: {review}\nProduct: {product} ({kind})\nUser: {user}\n\nGood or bad?"
PRODUCTS = ("a kettle that whistles when the water is hot", "a lamp with a long neck and a heavy foot")


def rows(count: int = 12) -> list[dict[str, str]]:
    return [
        {
            "review": f"Number {number} is about it.",
            "product": PRODUCTS[number % 2],
            "kind": "house",
            "user": f"user {number}",
        }
        for number in range(count)
    ]


def write(path: Path, content: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def prompts(path: Path, **options: object) -> list[str]:
    report = run(path, None, model=FakeEngine(), dry_run=True, prompt_template=TEMPLATE, **options)  # type: ignore[arg-type]
    return [str(each.body["prompt"]) for each in report.first_requests]


def test_what_rows_share_comes_first_and_all_else_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", rows())
    plain, other = prompts(path), prompts(path, reorder_fields=True)
    assert plain[0].startswith("Judge.\n\nReview: Number 0")
    assert other[0] == (
        f"Judge.\n\nProduct: {PRODUCTS[0]} (house)\nReview: Number 0 is about it.\nUser: user 0\n\nGood or bad?"
    )
    for one, another in zip(plain, other, strict=True):
        assert sorted(one.split("\n")) == sorted(another.split("\n"))


def test_the_gain_is_told_and_found_in_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", rows())
    report = run(
        path,
        tmp_path / "out.jsonl",
        model=FakeEngine(),  # type: ignore[arg-type]
        prompt_template=TEMPLATE,
        reorder_fields=True,
    )
    assert (report.succeeded, report.failed) == (12, 0)
    assert report.reordered_fields is not None
    assert report.reordered_fields.before == 0.0
    assert report.reordered_fields.after > 0.4
    template = TEMPLATE.replace("\n", "\\n")
    result = CliRunner().invoke(
        app,
        [
            *("plan", str(path), "--backend", "http://127.0.0.1:1/v1", "--model", "m"),
            *("--prompt-template", template, "--reorder-fields"),
        ],
    )
    assert "of the fields' text begins as in an earlier row" in " ".join(result.output.split())


def test_a_run_that_is_continued_keeps_to_it(tmp_path: Path) -> None:
    path, out = write(tmp_path / "in.jsonl", rows()), tmp_path / "out.jsonl"
    options = {"model": FakeEngine(), "prompt_template": TEMPLATE}
    run(path, out, limit=5, reorder_fields=True, **options)  # type: ignore[arg-type]
    assert run(path, out, reorder_fields=True, **options).resumed == 5  # type: ignore[arg-type]
    with pytest.raises(ResumeRefused, match="reorder_fields"):
        run(path, out, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", ["Review: {review}, of {product}", "Review: {review}\n\nProduct: {product}"])
def test_a_template_without_independent_fields_is_refused(tmp_path: Path, template: str) -> None:
    path = write(tmp_path / "in.jsonl", rows())
    with pytest.raises(InputError, match="no two lines in a row with columns"):
        run(path, None, model=FakeEngine(), dry_run=True, prompt_template=template, reorder_fields=True)  # type: ignore[arg-type]


def test_it_needs_a_template(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(InputError, match="give --prompt-template"):
        run(path, None, model=FakeEngine(), dry_run=True, reorder_fields=True)  # type: ignore[arg-type]
