"""The provider with limits: the official client against it, its faults, its cache, its ledger, and the comparison."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from benchmarks.provider import cli, report
from benchmarks.provider.amounts import Quantity, Usage
from benchmarks.provider.answers import Fault, Law, Prices, PromptCache
from benchmarks.provider.clients import SYSTEMS
from benchmarks.provider.endpoints import Endpoint
from benchmarks.provider.jobs import job_of, lines, work_of
from benchmarks.provider.ledger import ANSWERED, Entry, Ledger
from benchmarks.provider.limits import FixedWindow, Limits
from benchmarks.provider.measures import Measures, measure
from benchmarks.provider.provider import Provider
from benchmarks.provider.report import Comparison
from benchmarks.provider.runs import KNOWLEDGE, Run, ledger_of, provider
from benchmarks.provider.scenarios import MAX_TOKENS, SCENARIOS, Headers
from benchmarks.provider.server import MODEL, Server, listening
from benchmarks.provider.sweep import Swept, Timeline, bodies, fixed, ours
from benchmarks.provider.systems.protocol import Task
from typer.testing import CliRunner

PROMPT = [{"role": "user", "content": "Say something. [line 7]"}]
AT_ONCE = Law(first_token=0.001, per_token=0.0)


@asynccontextmanager
async def serving(
    limits: Limits, law: Law = AT_ONCE, *, headers: Headers | None = "openai", retry_after: bool = True
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Provider]]:
    """A client of a provider whose clock stands still."""
    made = Provider(limits, law)
    server = Server(made, headers=headers, retry_after=retry_after, clock=lambda: 0.0)
    async with (
        listening(server) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, made


def two() -> Limits:
    return Limits(FixedWindow("requests per minute", Quantity.REQUESTS, 2))


async def ask(client: openai.AsyncOpenAI) -> Any:
    messages: Any = PROMPT
    return await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=MAX_TOKENS)


def test_the_official_client_is_answered_and_told_of_the_limits() -> None:
    async def run() -> None:
        async with serving(two()) as (client, made):
            assert [model.id async for model in client.models.list()] == [MODEL]
            raw = await client.chat.completions.with_raw_response.create(
                model=MODEL,
                messages=PROMPT,  # type: ignore[arg-type]
                max_tokens=MAX_TOKENS,
            )
            assert raw.headers["x-ratelimit-limit-requests"] == "2"
            assert raw.headers["x-ratelimit-remaining-requests"] == "1"
            done = raw.parse()
            assert done.usage is not None
            entry = made.ledger.entries[0]
            assert (entry.line, entry.outcome, entry.status, entry.paid) == (7, ANSWERED, 200, True)
            assert entry.key == "none"
            assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (entry.input_tokens, entry.output_tokens)
            assert len(done.choices[0].message.content or "") == 4 * entry.output_tokens
            again = await ask(client)
            assert again.choices[0].message.content == done.choices[0].message.content

    asyncio.run(run())


def test_a_refusal_names_the_limit_and_when_to_try_again() -> None:
    async def run() -> None:
        async with serving(two()) as (client, made):
            await ask(client)
            await ask(client)
            with pytest.raises(openai.RateLimitError) as raised:
                await ask(client)
            assert "requests per minute: Limit 2, Used 2, Requested 1. Please try again in 1m0s" in str(raised.value)
            assert raised.value.response.headers["retry-after"] == "60"
            refused = made.ledger.refused
            assert [(entry.limit, entry.status, entry.paid) for entry in refused] == [
                ("requests per minute", 429, False)
            ]

    asyncio.run(run())


def test_limits_are_hidden_where_no_headers_are_sent() -> None:
    async def run() -> None:
        async with serving(two(), headers=None, retry_after=False) as (client, _):
            for _ in range(2):
                await ask(client)
            with pytest.raises(openai.RateLimitError) as raised:
                await ask(client)
            assert not [name for name in raised.value.response.headers if "ratelimit" in name or "retry" in name]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "error", "paid"),
    [
        (Fault.SERVER_ERROR, openai.InternalServerError, False),
        (Fault.UNAVAILABLE, openai.InternalServerError, False),
        (Fault.OVERLOADED, openai.InternalServerError, False),
        (Fault.TIMEOUT, openai.APIStatusError, False),
        (Fault.RESET, openai.APIConnectionError, False),
        (Fault.BROKEN, openai.APIError, True),
        (Fault.TRUNCATED, json.JSONDecodeError, True),
    ],
)
def test_each_fault_reaches_the_client(fault: Fault, error: type[Exception], paid: bool) -> None:
    law = Law(first_token=0.001, per_token=0.0, faults={fault: 1.0}, timeout_seconds=0.001)

    async def run() -> None:
        async with serving(Limits(), law) as (client, made):
            with pytest.raises(error):
                await ask(client)
            entry = made.ledger.entries[0]
            assert (entry.outcome, entry.paid, entry.nanodollars > 0) == (str(fault), paid, paid)

    asyncio.run(run())


def test_a_page_in_place_of_json() -> None:
    async def run() -> None:
        law = Law(first_token=0.001, faults={Fault.HTML: 1.0})
        async with serving(Limits(), law) as (client, made), aiohttp.ClientSession() as session:
            url = f"{client.base_url}chat/completions"
            async with session.post(url, json={"model": MODEL, "messages": PROMPT}) as response:
                assert (response.status, response.content_type) == (200, "text/html")
            assert made.ledger.outcomes() == {"html": 1}

    asyncio.run(run())


def test_messages_are_answered_in_their_form() -> None:
    async def run() -> None:
        async with serving(two(), headers="anthropic") as (client, _), aiohttp.ClientSession() as session:
            body = {"model": MODEL, "system": "Be brief.", "max_tokens": 9, "messages": PROMPT}
            async with session.post(f"{client.base_url}messages", json=body) as response:
                answer = await response.json()
                assert response.headers["anthropic-ratelimit-requests-remaining"] == "1"
            assert answer["content"][0]["type"] == "text"
            assert answer["usage"]["output_tokens"] <= 9

    asyncio.run(run())


def test_a_client_that_goes_away_pays_all_the_same() -> None:
    """The answer takes three times as long as the client waits; what the client does is awaited, not timed."""
    slow = Law(first_token=0.3, first_token_spread=0.0, per_token=0.0)

    async def run() -> Ledger:
        async with serving(Limits(), slow) as (client, made):
            with pytest.raises(openai.APITimeoutError):
                await ask(client.with_options(timeout=0.1))
            # Leaving the block waits for the requests that are under way.
        return made.ledger

    ledger = asyncio.run(run())
    assert (ledger.outcomes(), ledger.dollars > 0) == ({"abandoned": 1}, True)


def test_a_long_prefix_is_billed_as_cached_for_five_minutes() -> None:
    cache = PromptCache()
    prefix = "x" * 4 * 1200
    assert cache.cached_tokens(0, prefix + "a") == 0
    cache.add(0, prefix + "a")
    assert cache.cached_tokens(300, prefix + "b") == 1152
    assert cache.cached_tokens(300, "y" + prefix) == 0
    assert cache.cached_tokens(301, prefix + "b") == 0
    cache.add(0, "z" * 4 * 1023)
    assert cache.cached_tokens(1, "z" * 4 * 1023) == 0
    assert Prices().nanodollars(Usage(1, 2000, 100, 1152)) == 848 * 2500 + 1152 * 1250 + 100 * 10_000


def test_a_ledger_is_read_from_another_process() -> None:
    async def one(address: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            await ask(client)

    with provider("rpm", headers=True, retry_after=True) as address:
        asyncio.run(one(address))
        ledger = ledger_of(address)
    assert [(entry.line, entry.outcome) for entry in ledger] == [(7, ANSWERED)]
    assert ledger.dollars == pytest.approx(ledger.entries[0].nanodollars / 1e9)


def test_every_attempt_has_its_fate_whatever_the_order() -> None:
    law = SCENARIOS["errors"].law
    fates = [law.draw(line, attempt, 200) for line in range(400) for attempt in range(3)]
    assert fates == [law.draw(line, attempt, 200) for line in range(400) for attempt in range(3)]
    shares = {fault: sum(fate.fault is fault for fate in fates) / len(fates) for fault in Fault}
    assert all(0.02 < share < 0.09 for share in shares.values()), shares


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job_takes_the_clairvoyant_client_about_as_long_as_was_asked_for(name: str) -> None:
    scenario = SCENARIOS[name]
    job = job_of(scenario, 20.0)
    assert 0 < job.plan.makespan <= 30
    assert len(job.plan.work) == sum(len(work_of(scenario, line)) for line in job.lines)
    assert [line.number for line in job.lines] == list(range(len(job.lines)))


def test_lines_are_told_apart_by_what_they_say(tmp_path: Path) -> None:
    job = job_of(SCENARIOS["errors"], 5.0)
    job.write(tmp_path / "in.jsonl")
    written = [json.loads(line) for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    assert len({line["custom_id"] for line in written}) == len(job.lines)
    assert all(len(line["body"]["messages"][0]["content"]) == 4 * 1200 for line in written)
    assert next(lines(SCENARIOS["errors"])).body() == written[0]["body"]


def perfect(job: Any, delay: float = 0.0) -> Ledger:
    """The ledger of a client that does as the plan does, so many seconds later."""
    entries = [
        Entry(
            line.number,
            arrived=begin + delay,
            ended=end + delay,
            outcome=ANSWERED,
            input_tokens=tokens,
            paid=True,
            nanodollars=1,
        )
        for line, tokens, begin, end in zip(
            job.lines, job.tokens_of_lines, sorted(job.plan.admitted), sorted(job.plan.ended), strict=True
        )
    ]
    return Ledger(entries)


def test_the_measures_of_the_clairvoyant_client_itself() -> None:
    job = job_of(SCENARIOS["quantized"], 20.0)
    got = measure(job, perfect(job), len(job.lines))
    assert (got.share, got.makespan, got.refused_per_thousand, got.to_rate, got.paid_twice) == (1.0, 1.0, 0.0, 0.0, 0)


def test_what_is_late_refused_and_paid_twice_is_seen() -> None:
    job = job_of(SCENARIOS["quantized"], 20.0)
    ledger = perfect(job, delay=job.plan.makespan)
    first = ledger.entries[0]
    ledger.entries.append(Entry(first.line, first.ended or 0.0, ended=50.0, outcome=ANSWERED, paid=True, nanodollars=1))
    ledger.entries.append(Entry(first.line, 51.0, ended=51.0, outcome="refused", status=429))
    got = measure(job, ledger, len(job.lines) - 1)
    assert (got.share, got.paid_twice) == (0.0, 1)
    assert got.makespan == pytest.approx(2.0)
    assert got.refused_per_thousand == pytest.approx(1000 / len(ledger))
    assert got.to_rate is None
    assert measure(job, perfect(job, delay=5.0), len(job.lines)).to_rate == pytest.approx(4.0, abs=1.5)


def test_what_is_under_way_twice_at_once_is_not_asked_again_after_an_answer() -> None:
    both = [
        Entry(1, 0.0, ended=2.0, outcome=ANSWERED, paid=True),
        Entry(1, 1.0, ended=3.0, outcome=ANSWERED, paid=True),
    ]
    assert Ledger(both).paid_again() == []
    assert Ledger([*both, Entry(1, 2.0, ended=4.0, outcome=ANSWERED, paid=True)]).paid_again() != []


def measures(share: float, refused: float) -> Measures:
    return Measures(
        lines=10,
        answered=10,
        written=10,
        share=share,
        makespan=1.0,
        refused_per_thousand=refused,
        to_rate=0.0,
        paid_twice=0,
        dollars=1.0,
        outcomes={ANSWERED: 10},
    )


def test_the_page_says_where_another_is_better() -> None:
    runs = [
        Run(SYSTEMS["batchwright"], measures(0.98, 4.0), "`run --backend`"),
        Run(SYSTEMS["litellm"], measures(0.99, 90.0), "litellm 1"),
        Run(SYSTEMS["saturate"], None, "exit status 1: no"),
    ]
    page = report.page([Comparison("rpm", True, True, 10, 100.0, runs)], side=3)
    assert "- At least 97% of the allowed tokens: **met** (1 of 1)." in page
    assert "  - rpm configured+headers: litellm router delivers 99.0%, ours 98.0%" in page
    assert "- saturate: exit status 1: no" in page
    worse = [Run(SYSTEMS["batchwright"], measures(0.96, 6.0), ""), *runs[1:]]
    page = report.page([Comparison("rpm", True, True, 10, 100.0, worse)], side=3)
    assert "**not met** in 1 of 1: rpm configured+headers (96.0%)" in page


def test_the_page_says_where_ours_has_failed() -> None:
    runs = [Run(SYSTEMS["batchwright"], None, "exit status 2: no such option")]
    page = report.page([Comparison("rpm", True, True, 10, 100.0, runs)], side=1)
    assert "- Ours could not do the job in 1 of 1: rpm configured+headers." in page
    assert "**met**" not in page


def test_a_rate_is_that_after_the_first_tenth() -> None:
    slow_at_first = Timeline(times=[10.0, 11.0, 12.0], tokens=[10, 45, 45])
    assert slow_at_first.rate == pytest.approx(45.0)
    swept = Swept("server", {1: [10.0, 20.0], 8: [40.0, 50.0]}, ours=[44.0, 45.1])
    assert swept.best == 8
    assert swept.ratio == pytest.approx(0.99)
    page = report.swept_page([swept], lines=10, rounds=2)
    assert "at least 97% of what 8 requests under way give, after the first 10% of the job: **met** (99.0%)" in page


def test_ours_and_a_fixed_number_of_requests_under_way_are_watched_alike() -> None:
    with provider("rpm", headers=False, retry_after=False) as address:
        endpoint = Endpoint(f"{address}/v1", MODEL)
        requests = bodies(MODEL, 12, seed=1)
        plain, own = fixed(endpoint, requests, 6), ours(endpoint, requests)
        ledger = ledger_of(address)
    assert (len(plain.tokens), len(own.tokens), len(ledger.refused)) == (12, 12, 0)
    assert sum(plain.tokens) + sum(own.tokens) == sum(entry.output_tokens for entry in ledger)
    assert min(plain.rate, own.rate) > 0


def test_the_command_with_our_client(tmp_path: Path) -> None:
    page = tmp_path / "providers.md"
    arguments = ["--scenario", "rpm", "--system", "batchwright", "--seconds", "3", "--save", str(page)]
    done = CliRunner().invoke(cli.app, [*arguments, "--knowledge", "unconfigured+headers"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "| batchwright |" in page.read_text()
    assert "- Every line is answered: **met** (1 of 1)." in page.read_text()


@pytest.mark.parametrize(
    ("told", "concurrency"),
    [({}, 32), ({"rpm": 600}, 15), ({"rpm": 3000, "tpm": 180_000}, 15), ({"rpm": 600, "concurrency": 4}, 4)],
)
def test_a_client_is_given_as_many_requests_under_way_as_its_limits_allow(told: Any, concurrency: int) -> None:
    task = Task("url", "job", "output", MODEL, MAX_TOKENS, **told)
    assert task.useful_concurrency == concurrency


def test_the_command_names_what_there_is() -> None:
    done = CliRunner().invoke(cli.app, ["--scenario", "nowhere"])
    assert done.exit_code == 2
    assert set(KNOWLEDGE) == {"configured", "configured+headers", "unconfigured", "unconfigured+headers"}


def test_a_ledger_survives_its_encoding() -> None:
    ledger = Ledger([Entry(1, 2.0, ended=3.0, outcome=ANSWERED)], now=4.0)
    assert msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger) == ledger
