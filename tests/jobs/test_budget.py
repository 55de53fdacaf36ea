"""`run` with a budget, against an endpoint with a ledger: whatever is paid was counted, and it is never too much."""

from __future__ import annotations

import csv
import json
import random
import signal
import subprocess
import sys
import time
from array import array
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from aiohttp import web
from tests.jobs.fakes import by_id, codes, read
from tests.jobs.paid_endpoint import PRICE, PaidEndpoint, serving
from tests.long_form import examples

from batchwright.errors import BudgetExhausted, InputError, ResumeRefused, RunFailed
from batchwright.jobs.job_run import RunProgress
from batchwright.jobs.loop import Tally
from batchwright.jobs.report import RunReport
from batchwright.jobs.run import run
from batchwright.jobs.spend_journal import SpendJournal, SpendTotals, journal_path
from batchwright.jobs.spending import lines_covered, lines_per_answer
from batchwright.planning.identical import Repeats
from batchwright.pricing.rates import DOLLAR
from batchwright.request import SamplingParams

LINES = 60
FAULTS = {"429": 0.05, "500": 0.05, "reset": 0.04, "half": 0.04, "504": 0.03, "unread": 0.03}


def write_lines(path: Path, number: int = LINES, **fields: Any) -> Path:
    lines = (
        {"id": f"q{each}", "messages": [{"role": "user", "content": f"Question {each}"}], "max_tokens": 50, **fields}
        for each in range(number)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def cents(dollars: float | Decimal) -> int:
    return round(Decimal(str(dollars)) * 100)


def spending_of(report: RunReport) -> Any:
    assert report.spending is not None
    return report.spending


def test_the_spend_is_that_of_the_ledger(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    shown: list[RunProgress] = []
    with serving(PaidEndpoint()) as endpoint:
        report = run(source, output, backend=endpoint.url, model="paid", price=PRICE, cost=True, progress=shown.append)
    spending = spending_of(report)
    assert report.succeeded == LINES
    assert Decimal(str(spending.cost)) == endpoint.ledger
    assert (spending.unknown_requests, spending.budget) == (0, None)
    usages = [line["response"]["body"]["usage"] for line in read(output)]
    assert sum(Decimal(str(usage["cost"])) for usage in usages) == endpoint.ledger
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert spending.cached_tokens == cached
    assert Decimal(str(spending.saved_by_caching)) == Decimal(cached * 150) / 10**6
    assert 0 < spending.cached_share < 1
    assert shown[-1].cost == spending.cost
    assert json.loads((tmp_path / "out.jsonl.spend").read_text())["totals"]["answers"] == LINES


def rows_of(table: Path) -> list[dict[str, Any]]:
    if table.suffix == ".csv":
        with table.open(newline="") as file:
            return [*csv.DictReader(file)]
    if table.suffix == ".parquet":
        return list(pq.read_table(table).to_pylist())
    return [json.loads(line) for line in table.read_text().splitlines()]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.jsonl"])
def test_the_cost_of_each_row_is_a_column_of_a_table(tmp_path: Path, name: str) -> None:
    rows = [{"city": city} for city in ("Oslo", "Rome", "Lima")]
    output = tmp_path / name
    with serving(PaidEndpoint()) as endpoint:
        defaults = SamplingParams(max_tokens=50)
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE, "defaults": defaults}
        report = run(rows, output, prompt_template="Where is {city}?", chat=True, cost=True, **options)
    assert report.succeeded == 3
    costs = [Decimal(str(row["cost"])) for row in rows_of(output)]
    assert min(costs) > 0
    assert sum(costs) == endpoint.ledger


@pytest.mark.parametrize("name", ["answers.parquet", "answers.csv", "answers.jsonl"])
def test_costs_that_are_asked_for_later_are_a_column_of_a_table_made_anew(tmp_path: Path, name: str) -> None:
    source, output = tmp_path / "cities.csv", tmp_path / name
    source.write_text("city\nOslo\nRome\n")
    with serving(PaidEndpoint()) as endpoint:
        defaults = SamplingParams(max_tokens=50)
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE, "defaults": defaults}
        options |= {"prompt_template": "Where is {city}?", "chat": True}
        run(source, output, **options)
        without = output.read_bytes()
        with pytest.raises(ResumeRefused, match=r"--cost: the answers of .* were computed without it"):
            run(source, output, cost=True, **options)
        assert output.read_bytes() == without
        # What is computed from here on says its cost.
        source.write_text("city\nOslo\nRome\nLima\n")
        run(source, output, cost=True, **options)
        with_costs = rows_of(output)
        assert [bool(row["cost"]) for row in with_costs] == [False, False, True]
        asked = endpoint.charged
        run(source, output, **options)
        assert all("cost" not in row for row in rows_of(output))
        run(source, output, cost=True, **options)
        assert rows_of(output) == with_costs
        assert endpoint.charged == asked == 3


def test_a_budget_ends_the_run_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    with serving(PaidEndpoint(delay=0.001)) as endpoint:
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE}
        with pytest.raises(BudgetExhausted) as ended:
            run(source, output, budget=0.50, report=tmp_path / "report.json", **options)
        done = len(read(output))
        assert 0 < done < LINES
        assert Decimal("0.30") < endpoint.ledger <= Decimal("0.50")
        told = str(ended.value)
        assert told.startswith("the budget of $0.50 is spent: $0.")
        assert f"for {done} of {LINES} lines" in told
        assert "a larger --budget goes on" in told
        written = json.loads((tmp_path / "report.json").read_text())
        assert written["spending"]["budget"] == 0.5
        # All that was paid is in the output: the lines under way were finished.
        assert endpoint.charged == done
        # What waited for money was not sent.
        assert (
            sum(each["sent"] for each in json.loads((tmp_path / "report.json").read_text())["pacing"].values()) == done
        )
        # With the same budget there is nothing to be had.
        with pytest.raises(BudgetExhausted, match=f"for {done} of {LINES} lines"):
            run(source, output, budget="0.50", **options)
        assert endpoint.charged == done
        before = endpoint.ledger
        report = run(source, output, budget=5, **options)
    spending = spending_of(report)
    assert (report.succeeded, endpoint.charged) == (LINES, LINES)
    assert Decimal(str(spending.cost_of_all_runs)) == endpoint.ledger
    assert Decimal(str(spending.cost)) == endpoint.ledger - before


def test_an_answer_is_kept_if_there_is_no_money_to_ask_again(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    endpoint = PaidEndpoint()
    endpoint.least_answer = 50
    with serving(endpoint):
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE, "budget": 0.14}
        options |= {"retry_invalid": 1, "defaults": {"json_object": True}}
        with pytest.raises(BudgetExhausted):
            run(source, output, **options)  # 50 tokens take 5 cents, and 100 would take 10
        (line,) = read(output)
        assert line["response"]["body"]["choices"][0]["finish_reason"] == "invalid_json"
        report = run(source, output, **options)
    assert (report.resumed, endpoint.charged) == (1, 1)


def test_an_answer_is_kept_if_the_quota_is_used_up_before_it_is_asked_again(tmp_path: Path) -> None:
    class ShortOfMoney(PaidEndpoint):
        async def chat(self, request: web.Request) -> web.StreamResponse:
            if self.charged:
                error = {"message": "You exceeded your current quota", "code": "insufficient_quota"}
                return web.json_response({"error": error}, status=429)
            return await super().chat(request)

    source, output = write_lines(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    with serving(ShortOfMoney()) as endpoint, pytest.raises(RunFailed, match="quota"):
        run(source, output, backend=endpoint.url, model="paid", retry_invalid=1, defaults={"json_object": True})
    (line,) = read(output)
    assert line["response"]["body"]["choices"][0]["finish_reason"] == "invalid_json"


def test_answers_that_are_asked_for_again_count(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with serving(PaidEndpoint()) as endpoint:
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE, "cost": True}
        report = run(source, output, retry_invalid=2, defaults={"json_object": True}, **options)
    spending, usages = spending_of(report), [line["response"]["body"]["usage"] for line in read(output)]
    assert endpoint.charged == 9
    assert sum(Decimal(str(usage["cost"])) for usage in usages) == endpoint.ledger == Decimal(str(spending.cost))
    assert report.cached_tokens == spending.cached_tokens
    assert report.prompt_tokens == 3 * sum(usage["prompt_tokens"] for usage in usages)
    assert report.generated_tokens > sum(usage["completion_tokens"] for usage in usages)


def test_requests_that_wait_for_the_budget_are_shown_as_waiting(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    shown: list[RunProgress] = []
    # A request may cost $0.13, so that three of them are under way at most, and the others wait; all lines cost more
    # than there is.
    with serving(PaidEndpoint(delay=0.01)) as endpoint, pytest.raises(BudgetExhausted):
        run(
            source, output, backend=endpoint.url, model="paid", price=PRICE, budget=0.50, backend_concurrency=16,
            progress=shown.append,
        )  # fmt: skip
    assert max(figures.under_way for each in shown for figures in each.pacing.values()) <= 3
    assert endpoint.most_under_way <= 3
    waiting = [each.waiting for each in shown if each.waiting]
    assert waiting
    assert all(text.endswith(" until there is room in the budget") for text in waiting)
    covered = [each for each in shown if each.budget_covers is not None]
    assert covered
    assert all(each.seconds_left is None for each in covered)
    assert 10 < (covered[-1].budget_covers or 0) < LINES


def test_lines_that_cost_nothing_are_covered_by_the_budget(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", 40, temperature=0), tmp_path / "out.jsonl"
    source.write_text(source.read_text() + source.read_text().replace('"id": "q', '"id": "copy'))
    shown: list[RunProgress] = []
    with serving(PaidEndpoint()) as endpoint:
        endpoint.least_answer, endpoint.caches = 50, False
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE, "backend_concurrency": 2}
        report = run(source, output, budget=3.2, progress=shown.append, **options)
    assert (report.succeeded, report.deduplicated) == (80, 40)
    assert 1.6 < spending_of(report).cost < 3.2
    assert [each.budget_covers for each in shown if each.budget_covers is not None] == []


def test_what_was_lost_may_be_more_than_the_budget() -> None:
    totals = SpendTotals(spent=DOLLAR, answers=20, kept=3 * DOLLAR)
    meter = cast("Any", SimpleNamespace(limit=2 * DOLLAR, totals=totals))
    assert lines_covered(meter, 60, 1.0) == 0
    meter.limit = 5 * DOLLAR
    assert [lines_covered(meter, 60, each) for each in (1.0, 1.25, 2.0)] == [40, 50, None]


def test_lines_that_cost_nothing_or_several_answers_change_what_a_budget_is_enough_for() -> None:
    assert lines_per_answer(Tally(), None, 60) == 1.0
    of_a_kind = Repeats(array("Q", range(40)), array("Q", [number % 10 for number in range(40)]))
    assert lines_per_answer(Tally(), of_a_kind, 60) == 2.0, "30 of 60 lines get the answer to another"
    assert lines_per_answer(Tally(succeeded=12, deduplicated=2, failed=5), None, 60) == 1.5
    assert lines_per_answer(Tally(succeeded=10, asked_again=10), None, 60) == 0.5


@pytest.mark.parametrize("seed", range(4))
def test_the_ledger_never_exceeds_the_budget(seed: int, tmp_path: Path) -> None:
    # Long prompts and answers that fill their limits: nearly all of what is reserved is paid.
    filler = [{"role": "user", "content": "words " * 1000}]
    source, output = write_lines(tmp_path / "in.jsonl", messages=filler), tmp_path / "out.jsonl"
    budget = [3, 12, 40, 400][seed]
    endpoint = PaidEndpoint(seed, FAULTS, delay=0.002)
    endpoint.least_answer = 50
    endpoint.caches = False
    with serving(endpoint):
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE, "backend_concurrency": 16}
        try:
            spending = spending_of(run(source, output, budget=budget, **options))
        except BudgetExhausted:
            assert budget < 400
            with pytest.raises(BudgetExhausted):
                run(source, output, budget=budget, **options)
            spending = None
    journal = SpendJournal(
        journal_path(output), json.loads(output.with_name("out.jsonl.batchwright.json").read_text())["job"]
    )
    paid = endpoint.ledger - endpoint.lost
    assert endpoint.ledger <= Decimal(str(budget))
    assert Decimal(journal.totals.spent) / DOLLAR == paid
    assert endpoint.lost <= Decimal(journal.totals.kept) / DOLLAR
    if spending is not None:
        assert cents(spending.cost_of_all_runs) == cents(paid)
        assert Decimal(str(spending.unknown_at_most)) >= endpoint.lost


def command(source: Path, output: Path, url: str, budget: str) -> list[str]:
    options = ["--backend", url, "--model", "paid", "--price", PRICE, "--budget", budget, "--backend-concurrency", "8"]
    return [sys.executable, "-m", "batchwright", "run", str(source), "-o", str(output), *options]


def test_killed_at_random_and_resumed_it_stays_within_the_budget(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", 90), tmp_path / "out.jsonl"
    chance = random.Random(3)
    kills = 0
    with serving(PaidEndpoint(5, {"429": 0.05}, delay=0.04)) as endpoint:
        for _ in range(examples(2, long=3)):
            before = endpoint.charged
            process = subprocess.Popen([*command(source, output, endpoint.url, "4"), "-q"], stderr=subprocess.PIPE)
            wanted = before + chance.randint(1, 25)
            while process.poll() is None and endpoint.charged < wanted:
                time.sleep(0.002)
            process.kill()
            _, errors = process.communicate()
            kills += process.returncode == -signal.SIGKILL
            assert process.returncode in (-signal.SIGKILL, 0, 1), errors
            assert endpoint.ledger <= 4
        assert kills
        done = subprocess.run([*command(source, output, endpoint.url, "4"), "--report", "-"], capture_output=True)
        assert done.returncode in (0, 1), done.stderr
        assert endpoint.ledger <= 4
        done = subprocess.run([*command(source, output, endpoint.url, "50"), "--report", "-"], capture_output=True)
        assert done.returncode == 0, done.stderr
    assert len(by_id(output)) == 90
    spending = json.loads(done.stdout)["spending"]
    # An answer may have been on its way, or paid and not noted, at each kill: at most as many as were under way.
    assert endpoint.charged - 90 <= 8 * kills
    known = Decimal(str(spending["cost_of_all_runs"]))
    assert known <= endpoint.ledger <= known + Decimal(str(spending["unknown_at_most"]))
    assert spending["unknown_requests"] <= 8 * kills


def test_the_command_says_what_is_spent_and_how_to_go_on(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    with serving(PaidEndpoint()) as endpoint:
        done = subprocess.run(command(source, output, endpoint.url, "0.50"), capture_output=True, text=True)
        assert done.returncode == 1
        assert "error: the budget of $0.50 is spent: $0.4" in done.stderr
        assert "\nStopped: " in done.stderr
        assert " in all runs, of $0.50" in done.stderr
        quiet = subprocess.run([*command(source, output, endpoint.url, "0.50"), "-q"], capture_output=True, text=True)
        assert quiet.stderr.startswith("error: the budget of $0.50 is spent")
        done = subprocess.run(command(source, output, endpoint.url, "9"), capture_output=True, text=True)
        assert done.returncode == 0
        assert f"in this run, ${endpoint.ledger:.2f} in all runs, of $9.00" in done.stderr
        again = subprocess.run(command(source, output, endpoint.url, "9"), capture_output=True, text=True)
        assert "nothing left to do" in again.stderr
        assert f"$0.00 in this run, ${endpoint.ledger:.2f} in all runs" in again.stderr


def test_what_cannot_be_priced_is_refused_under_a_budget_only(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    with serving(PaidEndpoint()) as endpoint:
        for model in ("paid", None):  # None: the first that the endpoint lists
            with pytest.raises(InputError, match=r"price of the model 'paid' is not known.*--price"):
                run(source, output, backend=endpoint.url, model=model, budget=1)
            with pytest.raises(InputError, match="is not known"):
                run(source, output, backend=endpoint.url, model=model, cost=True)
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
        assert run(source, output, backend=endpoint.url, model="paid").spending is None
        assert not journal_path(output).exists()
        assert endpoint.charged == 2
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]
        lines = [
            {"id": "endless", "messages": [{"role": "user", "content": "a"}]},
            {"id": "image", "messages": image, "max_tokens": 5},
            {"id": "fine", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        report = run(source, output, backend=endpoint.url, model="paid", budget=1, price=PRICE, overwrite=True)
        results = by_id(output)
        error = results["endless"]["error"]
        assert (error["code"], error["param"]) == ("max_tokens_missing", "max_tokens")
        assert "image_url" in results["image"]["error"]["message"]
        assert results["fine"]["error"] is None
        assert (report.succeeded, report.failed, sum(codes(report).values())) == (1, 2, 2)


def test_lines_without_a_limit_are_told_before_anything_is_sent(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    endless = json.dumps({"messages": [{"role": "user", "content": "Go on"}]}) + "\n"
    with serving(PaidEndpoint()) as endpoint:
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE, "budget": 100}
        for number, told in ((3, "none of the 3 lines has"), (120, "none of the first 100 lines has")):
            source.write_text(endless * number)
            with pytest.raises(InputError, match=f"{told} max_tokens, .*: give it for all with --max-tokens"):
                run(source, output, **options)
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
        assert run(source, output, defaults={"max_tokens": 5}, **options).succeeded == 120
        # Where only some lack it, they fail by themselves.
        write_lines(source, 3)
        source.write_text(endless + source.read_text())
        some = command(source, tmp_path / "some.jsonl", endpoint.url, "9")
        done = subprocess.run(some, capture_output=True, text=True)
    assert (done.returncode, endpoint.charged) == (3, 123)
    assert "1 line without max_tokens: what they may cost has no bound" in " ".join(done.stderr.split())


@pytest.mark.parametrize("is_left", [False, True])
def test_only_lines_that_are_left_need_a_limit(tmp_path: Path, is_left: bool) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "Go on"}]}
    kinds = [body, {**body, "max_tokens": 5}]
    first, second = [json.dumps(each) + "\n" for each in (kinds[::-1] if is_left else kinds)]
    with serving(PaidEndpoint()) as endpoint:
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE, "dedupe": False}
        source.write_text(first)
        assert run(source, output, **options).succeeded == 1
        source.write_text(first + second)
        if is_left:
            told = "none of the 1 lines left has max_tokens, .*: go on without a budget, or start over with --overwrite"
            with pytest.raises(InputError, match=told):
                run(source, output, budget=100, **options)
            assert run(source, output, **options).succeeded == 2
        else:
            assert run(source, output, budget=100, **options).succeeded == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"budget": 0}, "budget=0: must be an amount in dollars"),
        ({"budget": "five"}, "budget='five'"),
        ({"price": "input=1"}, "price lacks output"),
        ({"price": PRICE, "prices": "nowhere.toml"}, "give one of them"),
        ({"prices": "nowhere.toml"}, "nowhere.toml cannot be read: No such file"),
        ({"budget": 5, "backend": None}, "budget=5 is for an endpoint that is paid"),
    ],
)
def test_terms_that_make_no_sense(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 1)
    output = tmp_path / options.pop("output", "out.jsonl")
    with pytest.raises(InputError, match=told):
        run(source, output, **{"backend": "http://127.0.0.1:1/v1", "model": "m", **options})


def test_no_answer_near_the_limit_is_said(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 3, max_tokens=2000)
    endpoint = PaidEndpoint()
    endpoint.least_answer = 7
    endpoint.most_answer = 7
    with serving(endpoint):
        report = run(source, tmp_path / "out.jsonl", backend=endpoint.url, model="paid", price=PRICE)
    assert (report.longest_answer, report.unreached_limit) == (7, 2000)


def test_a_dry_run_tells_the_price(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", 10), tmp_path / "out.jsonl"
    with serving(PaidEndpoint()) as endpoint:
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE}
        planned = run(source, output, dry_run=True, **options).planned_cost
        assert planned is not None
        assert planned.live.at_most is not None
        assert planned.live.answers_per_100_tokens == 10 * 50 * 1000 / 10**6  # no more than max_tokens
        assert planned.batch.at_most == pytest.approx(planned.live.at_most / 2)
        assert planned.live.expected is None
        assert planned.cached is None
        assert not endpoint.charged
        run(source, output, **options)
        assert endpoint.ledger <= Decimal(str(planned.live.at_most))
        planned = run(source, output, dry_run=True, **options).planned_cost
    assert planned is not None
    assert planned.live.expected is not None
    assert planned.live.expected == pytest.approx(float(endpoint.ledger), rel=0.5)
    shown = subprocess.run([*command(source, output, endpoint.url, "4"), "--dry-run"], capture_output=True, text=True)
    assert "Price as a batch: about $" in shown.stdout


def test_a_dry_run_prices_identical_lines_once(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", 4), tmp_path / "out.jsonl"
    lines = source.read_text()
    source.write_text(lines + "".join(line.replace('"q', '"again-') + "\n" for line in lines.splitlines()[:3]))
    with serving(PaidEndpoint()) as endpoint:
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE, "dry_run": True}
        each = run(source, output, **options)
        once = run(source, output, defaults={"temperature": 0}, **options)
        shown = subprocess.run(
            [*command(source, output, endpoint.url, "4"), "--dry-run", "--temperature", "0"],
            capture_output=True,
            text=True,
        )
        assert run(source, output, defaults={"temperature": 0}, dedupe=False, **options).deduplicated == 0
    assert each.planned_cost is not None
    assert once.planned_cost is not None
    assert (each.deduplicated, once.deduplicated) == (0, 3)
    assert (each.planned_cost.lines, once.planned_cost.lines) == (7, 4)
    assert each.prompt_tokens == once.prompt_tokens + once.saved_prompt_tokens
    assert "7 lines, 0 of them would fail, 3 are identical to others and computed with them" in " ".join(
        shown.stdout.split()
    )
    assert "for the" not in shown.stdout.split("Price live")[1].split(":")[0]


def test_overwriting_starts_counting_again(tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with serving(PaidEndpoint()) as endpoint:
        options: dict[str, Any] = {"backend": endpoint.url, "model": "paid", "price": PRICE}
        first = spending_of(run(source, output, **options))
        second = spending_of(run(source, output, overwrite=True, **options))
        assert second.cost == second.cost_of_all_runs
        assert Decimal(str(first.cost)) + Decimal(str(second.cost)) == endpoint.ledger
        # Lines that are appended belong to the job.
        with source.open("a") as file:
            file.write(json.dumps({"messages": [{"role": "user", "content": "more"}], "max_tokens": 5}) + "\n")
        third = spending_of(run(source, output, **options))
        assert third.cost_of_all_runs == pytest.approx(second.cost + third.cost)
        run(source, output, overwrite=True, backend=endpoint.url, model="paid")
        assert not journal_path(output).exists()


def test_a_stream_has_a_budget_too(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    with serving(PaidEndpoint()) as endpoint:
        done = subprocess.run([*command(source, Path("-"), endpoint.url, "0.50"), "-q"], capture_output=True)
        assert done.returncode == 1
        assert endpoint.ledger <= Decimal("0.50")
        assert len(done.stdout.splitlines()) == endpoint.charged
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
