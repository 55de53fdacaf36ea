"""What `plan` says of the cache of an endpoint's provider: what is found there, and what that changes of the price."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from rich.console import Console
from tests.jobs.paid_endpoint import PRICE

from batchwright.cli.plan_views import show_plan
from batchwright.jobs.prompt_survey import SharedPrompts
from batchwright.jobs.report import RunReport
from batchwright.jobs.run import run


def write(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_dry_run_tells_what_the_cache_of_the_provider_may_save(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": "word " * 1000 + f"{number:05} " * 100, "max_tokens": 10} for number in range(10)]
    write(source, lines)
    options: dict[str, Any] = {"backend": "http://127.0.0.1:9/v1", "model": "paid", "dry_run": True}
    planned = run(source, None, price=PRICE, **options).planned_cost
    assert planned is not None
    assert planned.cached is not None
    # All but the first find 4,992 of 5,600 bytes, at a quarter of the price.
    share = 9 * 4992 / (10 * 5600)
    assert planned.cached.prompts == pytest.approx(planned.live.prompts * (1.0 - share * 0.75), rel=0.01)
    assert planned.cached.at_most == planned.live.at_most
    uncached = run(source, None, price="input=200,output=1000", **options).planned_cost
    assert uncached is not None
    assert uncached.cached is None
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), run(source, None, price=PRICE, **options), is_elsewhere=True)
    assert "Price live, with the provider's cache: about $" in stream.getvalue()


def test_what_a_provider_puts_into_its_cache_may_cost_more(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": "word " * 1000 + f"{number:05} " * 100, "max_tokens": 10} for number in range(10)]
    write(source, lines)
    options: dict[str, Any] = {"backend": "http://127.0.0.1:9/v1", "model": "paid", "dry_run": True}
    planned = run(source, None, price=PRICE + ",cache_write=250", **options).planned_cost
    assert planned is not None
    assert planned.cached is not None
    share = 9 * 4992 / (10 * 5600)
    change = 0.25 * (1.0 - share) - 0.75 * share
    assert planned.cached.prompts == pytest.approx(planned.live.prompts * (1.0 + change), rel=0.01)
    source.write_text(json.dumps(lines[0]) + "\n")
    alone = run(source, None, price=PRICE + ",cache_write=250", **options).planned_cost
    assert alone is not None
    assert alone.cached is not None
    assert alone.cached.prompts == pytest.approx(alone.live.prompts * 1.25), "all of it is put there, and nothing found"


def test_a_cache_saves_nothing_of_texts_to_embed(tmp_path: Path) -> None:
    source, prices = tmp_path / "in.jsonl", tmp_path / "prices.toml"
    prices.write_text(f"[chats]\n{PRICE.replace(',', chr(10))}\n[vectors]\ninput=2\ncached=1\noutput=0\n")
    bodies = [{"prompt": "word " * 1000 + f"{number:05} " * 100, "max_tokens": 10} for number in range(10)]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body | {"model": "chats"}}
        for number, body in enumerate(bodies)
    ]
    text = {"model": "vectors", "input": "x " * 20_000}
    lines.append({"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": text})
    saved = []
    for some in (lines[:-1], lines):
        source.write_text("".join(json.dumps(line) + "\n" for line in some))
        planned = run(source, None, backend="http://127.0.0.1:9/v1", prices=prices, dry_run=True).planned_cost
        assert planned is not None
        assert planned.cached is not None
        saved.append(planned.live.prompts - planned.cached.prompts)
    assert saved[0] == pytest.approx(saved[1])


MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("mark_of_system", "mark_of_question", "mark_of_body", "is_found"),
    [({}, {}, {}, False), (MARK, {}, {}, True), (MARK, MARK, {}, True), ({}, MARK, {}, False), ({}, {}, MARK, False)],
)
def test_anthropic_caches_only_what_lines_mark(
    tmp_path: Path,
    mark_of_system: dict[str, Any],
    mark_of_question: dict[str, Any],
    mark_of_body: dict[str, Any],
    is_found: bool,
) -> None:
    source, lines = tmp_path / "in.jsonl", []
    for number in range(10):
        system = {"type": "text", "text": "word " * 2000, **mark_of_system}
        question = {"type": "text", "text": f"Question {number}", **mark_of_question}
        messages = [{"role": "system", "content": [system]}, {"role": "user", "content": [question]}]
        lines.append({"messages": messages, "max_tokens": 10, **mark_of_body})
    write(source, lines)
    options: dict[str, Any] = {"backend": "http://127.0.0.1:9/v1", "model": "paid", "backend_dialect": "anthropic"}
    report = run(source, None, price=PRICE, dry_run=True, **options)
    assert report.shared_prompts is not None
    assert report.planned_cost is not None
    assert bool(report.shared_prompts.prefixes) == bool(report.shared_prompts.provider_tokens) == is_found
    assert (report.planned_cost.cached is not None) == is_found
    if report.planned_cost.cached is not None:
        change = report.planned_cost.cached.prompts / report.planned_cost.live.prompts
        assert change == pytest.approx(1.0 - 0.9 * 0.75, rel=0.03), "nine of ten lines find the system message"


def test_only_prefixes_that_a_provider_keeps_are_shown_of_it(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    prompts = ["short " * 200 + ("long " * 1000) * (number % 2) + f"{number:02}" for number in range(20)]
    source.write_text("".join(json.dumps({"prompt": each, "max_tokens": 10}) + "\n" for each in prompts))
    options: dict[str, Any] = {"backend": "http://127.0.0.1:9/v1", "model": "paid", "dry_run": True}
    report, stream = run(source, None, **options), io.StringIO()
    assert report.shared_prompts is not None
    [found] = report.shared_prompts.prefixes
    assert (found.lines, found.inside, found.text[:6]) == (10, [], "short ")
    assert found.saved_tokens == report.shared_prompts.provider_tokens
    show_plan(Console(file=stream, width=300), report, is_elsewhere=True)
    assert "75% of the prompt tokens are in prefixes that may be found in the provider's cache:" in stream.getvalue()
    assert f"10 lines, about {found.tokens:,} tokens, {found.saved_tokens:,} may be found" in stream.getvalue()
    source.write_text("".join(json.dumps({"prompt": each[:1500]}) + "\n" for each in prompts))
    assert run(source, None, **options).shared_prompts == SharedPrompts(ANY, ANY, [])


def marked(number: int, system: str, mark: dict[str, Any] = MARK, **more: Any) -> dict[str, Any]:
    """A line whose system message is marked."""
    content = [{"type": "text", "text": system, **mark}]
    messages = [{"role": "system", "content": content}, {"role": "user", "content": f"Question {number}"}]
    return {"messages": messages, "max_tokens": 10, **more}


def planned(folder: Path, lines: Sequence[dict[str, Any]], **options: Any) -> RunReport:
    given: dict[str, Any] = {"backend": "http://127.0.0.1:9/v1", "model": "paid", "dry_run": True, **options}
    return run(write(folder / "in.jsonl", lines), None, **given)


def change(report: RunReport) -> float:
    """What the prompts cost with the provider's cache, for each dollar without."""
    assert report.planned_cost is not None
    cached = report.planned_cost.cached
    return 1.0 if cached is None else cached.prompts / report.planned_cost.live.prompts


ANTHROPIC: dict[str, Any] = {"backend_dialect": "anthropic", "price": PRICE + ",cache_write=250"}


def test_what_is_put_into_the_cache_is_paid_for_though_nothing_is_found(tmp_path: Path) -> None:
    lines = [marked(number, f"{number:05} " * 1000) for number in range(10)]
    report = planned(tmp_path, lines, **ANTHROPIC)
    assert change(report) == pytest.approx(1.25, rel=0.01)
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), report, is_elsewhere=True)
    assert "Price live, with the provider's cache: about $" in stream.getvalue()


def test_what_is_kept_for_an_hour_costs_more_to_put_there(tmp_path: Path) -> None:
    price = f"{PRICE},cache_write=250,cache_write_1h=400"
    hourly = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    for mark, written in ((MARK, 1.25), (hourly, 2.0)):
        lines = [marked(number, f"{number:05} " * 1000, mark) for number in range(10)]
        assert change(planned(tmp_path, lines, **ANTHROPIC | {"price": price})) == pytest.approx(written, rel=0.01)
    # Of a line with both marks, what is before the first is kept for an hour.
    both = marked(0, "word " * 2000, hourly)
    both["messages"][1]["content"] = [{"type": "text", "text": "more " * 2000, **MARK}]
    assert change(planned(tmp_path, [both], **ANTHROPIC | {"price": price})) == pytest.approx(1.625, rel=0.01)


def tool(name: str, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "what it does " * 500, "parameters": {"type": "object"}}
    return {"type": "function", "function": function, **more}


@pytest.mark.parametrize(
    ("apart", "same", "other"),
    [
        ({}, {"tools": [tool("a")]}, {"tools": [tool("b")]}),
        ({"model": None}, {"model": "paid"}, {"model": "dear"}),
    ],
)
@pytest.mark.parametrize("options", [{"price": PRICE}, ANTHROPIC])
def test_prompts_with_other_tools_or_for_another_model_share_nothing(
    tmp_path: Path, apart: dict[str, Any], same: dict[str, Any], other: dict[str, Any], options: dict[str, Any]
) -> None:
    options = options | apart
    alike = planned(tmp_path, [marked(number, "word " * 2000, **same) for number in range(2)], **options)
    unlike = planned(tmp_path, [marked(0, "word " * 2000, **same), marked(1, "word " * 2000, **other)], **options)
    assert alike.shared_prompts is not None
    assert unlike.shared_prompts is not None
    assert alike.shared_prompts.provider_tokens > 2000
    assert unlike.shared_prompts.provider_tokens == 0
    assert change(alike) < 1.0 <= change(unlike)


def test_tools_are_part_of_the_prompt_and_can_be_marked(tmp_path: Path) -> None:
    def lines(mark: dict[str, Any]) -> list[dict[str, Any]]:
        tools = [tool("a"), tool("b", **mark)]
        messages = [[{"role": "user", "content": f"Question {number}"}] for number in range(10)]
        return [{"messages": each, "tools": tools, "max_tokens": 10} for each in messages]

    report = planned(tmp_path, lines({}), **ANTHROPIC)
    assert report.prompt_tokens == pytest.approx(10 * 2 * 500 * len("what it does ") / 4, rel=0.03)
    assert change(report) == 1.0
    assert change(planned(tmp_path, lines(MARK), **ANTHROPIC)) == pytest.approx(0.9 * 0.25 + 0.1 * 1.25, rel=0.01)


@pytest.mark.parametrize(("shared", "is_kept"), [(520, False), (1100, True)])
def test_a_cache_keeps_as_many_token_ids_as_tokens_of_text(tmp_path: Path, shared: int, is_kept: bool) -> None:
    lines = [{"prompt": [*range(shared), *[number] * 20], "max_tokens": 10} for number in range(10)]
    report = planned(tmp_path, lines, price=PRICE)
    assert report.prompt_tokens == 10 * (shared + 20)
    assert (change(report) < 1.0) == is_kept
    assert report.shared_prompts is not None
    assert [each.text[:18] for each in report.shared_prompts.prefixes] == ["token ids 0, 1, 2,"] * is_kept


def test_a_token_id_of_any_size(tmp_path: Path) -> None:
    assert planned(tmp_path, [{"prompt": [2**80, 5], "max_tokens": 10}]).prompt_tokens in (0, 2)
