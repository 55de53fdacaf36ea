"""The limits that answers state, in the forms that their owners document, and in any other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.wire.rate_limits import (
    StatedLimit,
    cause_of_refusal,
    limits_of_headers,
    limits_of_refusal,
    retry_after_of_refusal,
    seconds_until,
)

NOW = 1_767_225_600.0
"""2026-01-01T00:00:00Z."""

OPENAI = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-limit-tokens": "150000",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-remaining-tokens": "149984",
    "x-ratelimit-reset-requests": "1s",
    "x-ratelimit-reset-tokens": "6m0s",
}
AZURE = {
    "x-ratelimit-limit-requests": "250",
    "x-ratelimit-remaining-requests": "249",
    "x-ratelimit-limit-tokens": "250000",
    "x-ratelimit-remaining-tokens": "249984",
    "x-ms-region": "East US",
}
ANTHROPIC = {
    "anthropic-ratelimit-requests-limit": "50",
    "anthropic-ratelimit-requests-remaining": "49",
    "anthropic-ratelimit-requests-reset": "2026-01-01T00:00:02Z",
    "anthropic-ratelimit-tokens-limit": "48000",
    "anthropic-ratelimit-tokens-remaining": "47000",
    "anthropic-ratelimit-tokens-reset": "2026-01-01T00:00:01Z",
    "anthropic-ratelimit-input-tokens-limit": "40000",
    "anthropic-ratelimit-input-tokens-remaining": "39000",
    "anthropic-ratelimit-input-tokens-reset": "2026-01-01T00:00:01Z",
    "anthropic-ratelimit-output-tokens-limit": "8000",
    "anthropic-ratelimit-output-tokens-remaining": "8000",
    "anthropic-ratelimit-output-tokens-reset": "2026-01-01T00:00:00Z",
    "anthropic-organization-id": "x",
}
GROQ = {
    "retry-after": "2",
    "x-ratelimit-limit-requests": "14400",
    "x-ratelimit-limit-tokens": "18000",
    "x-ratelimit-remaining-requests": "14370",
    "x-ratelimit-remaining-tokens": "17997",
    "x-ratelimit-reset-requests": "2m59.56s",
    "x-ratelimit-reset-tokens": "7.66s",
}
MISTRAL = {
    "x-ratelimit-limit-tokens-minute": "500000",
    "x-ratelimit-remaining-tokens-minute": "499900",
    "x-ratelimit-limit-tokens-month": "1000000000",
    "x-ratelimit-tokens-query-cost": "52",
    "x-ratelimit-limit-req-minute": "720",
    "x-ratelimit-remaining-req-minute": "717",
}
CEREBRAS = {
    "x-ratelimit-limit-requests-day": "1000000000",
    "x-ratelimit-limit-tokens-minute": "1000000000",
    "x-ratelimit-remaining-requests-day": "999997455",
    "x-ratelimit-remaining-tokens-minute": "999998298",
    "x-ratelimit-reset-requests-day": "33011.382867097855",
    "x-ratelimit-reset-tokens-minute": "11.382867097854614",
}
TOGETHER = {
    "x-ratelimit-limit": "60",
    "x-ratelimit-remaining": "59",
    "x-ratelimit-reset": "1",
    "x-tokenlimit-limit": "30000",
    "x-tokenlimit-remaining": "29900",
}
FIREWORKS = {
    "x-ratelimit-limit-requests": "600",
    "x-ratelimit-remaining-requests": "598",
    "x-ratelimit-limit-tokens-prompt": "60000",
    "x-ratelimit-remaining-tokens-prompt": "59000",
    "x-ratelimit-limit-tokens-generated": "6000",
    "x-ratelimit-remaining-tokens-generated": "5990",
    "x-ratelimit-over-limit": "no",
}


@pytest.mark.parametrize(
    ("headers", "stated"),
    [
        (OPENAI, [StatedLimit("requests", 60, 59, 1.0), StatedLimit("tokens", 150_000, 149_984, 360.0)]),
        (AZURE, [StatedLimit("requests", 250, 249), StatedLimit("tokens", 250_000, 249_984)]),
        (
            ANTHROPIC,
            [
                StatedLimit("requests", 50, 49, 2.0),
                StatedLimit("tokens", 48_000, 47_000, 1.0),
                StatedLimit("input_tokens", 40_000, 39_000, 1.0),
                StatedLimit("output_tokens", 8000, 8000, 0.0),
            ],
        ),
        (GROQ, [StatedLimit("requests", 14_400, 14_370, 179.56), StatedLimit("tokens", 18_000, 17_997, 7.66)]),
        (
            MISTRAL,
            [
                StatedLimit("tokens", 500_000, 499_900, window=60.0),
                StatedLimit("requests", 720, 717, window=60.0),
            ],
        ),
        (
            CEREBRAS,
            [
                StatedLimit("requests", 10**9, 999_997_455, 33_011.382867097855, 86_400.0),
                StatedLimit("tokens", 10**9, 999_998_298, 11.382867097854614, 60.0),
            ],
        ),
        (
            FIREWORKS,
            [
                StatedLimit("requests", 600, 598),
                StatedLimit("input_tokens", 60_000, 59_000),
                StatedLimit("output_tokens", 6000, 5990),
            ],
        ),
        (TOGETHER, []),
        ({}, []),
    ],
    ids=["openai", "azure", "anthropic", "groq", "mistral", "cerebras", "fireworks", "together", "none"],
)
def test_headers_of_providers(headers: dict[str, str], stated: list[StatedLimit]) -> None:
    assert limits_of_headers(headers, NOW) == stated


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("120ms", 0.12),
        ("1m2.5s", 62.5),
        ("1h0m0s", 3600.0),
        ("1d2h", 93_600.0),
        ("8.64s", 8.64),
        ("0s", 0.0),
        ("0", 0.0),
        ("12", 12.0),
        ("12.5", 12.5),
        (" 12 ", 12.0),
        ("1767225610", 10.0),
        ("1767225590", 0.0),
        ("1767225610250", 10.25),
        ("2026-01-01T00:00:30Z", 30.0),
        ("2026-01-01T00:00:30+00:00", 30.0),
        ("2026-01-01T01:00:30+01:00", 30.0),
        ("2026-01-01T00:00:30", 30.0),
        ("2025-12-31T23:59:59Z", 0.0),
        ("soon", None),
        ("", None),
        ("-5", None),
        ("s", None),
        ("1e5", None),
        ("٣s", None),
        (None, None),
    ],
)
def test_resets(text: str | None, seconds: float | None) -> None:
    assert seconds_until(text, NOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("message", "stated", "after"),
    [
        (
            "Rate limit reached for gpt-4o in organization org-x on tokens per min (TPM): Limit 30000, Used 29000, "
            "Requested 1500. Please try again in 1s. Visit https://platform.openai.com/account/rate-limits.",
            [StatedLimit("tokens", 30_000, 1000, window=60.0)],
            1.0,
        ),
        (
            "Rate limit reached for gpt-4 on requests per min (RPM): Limit 3, Used 3, Requested 1. Please try again in "
            "20s.",
            [StatedLimit("requests", 3, 0, window=60.0)],
            20.0,
        ),
        (
            "Rate limit reached for model `llama3-70b` in organization `org_x` on tokens per minute (TPM): Limit 6000, "
            "Used 5600, Requested 1200. Please try again in 8.02s.",
            [StatedLimit("tokens", 6000, 400, window=60.0)],
            8.02,
        ),
        (
            "Rate limit reached for gpt-4o on requests per day (RPD): Limit 10,000, Used 10,000, Requested 1. Please "
            "try again in 8.64s.",
            [StatedLimit("requests", 10_000, 0, window=86_400.0)],
            8.64,
        ),
        (
            "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 40000. The input or output "
            "tokens must be reduced in order to run successfully.",
            [StatedLimit("tokens", 30_000, window=60.0)],
            None,
        ),
        ("Please try again in 250ms.", [], 0.25),
        ("Please retry after 26 seconds.", [], 26.0),
        ("Please retry after 1 minute", [], 60.0),
        ("Please try again in 6m0s.", [], 360.0),
        ("Please try again in 2m13.92s.", [], 133.92),
        ("Try again in 5 months", [], None),
        ("Please try again in 2 hours.", [], 7200.0),
        ("Please try again in 1 day.", [], 86_400.0),
        ("Try again in 5m.", [], 300.0),
        ("Try again in a while", [], None),
        ("Too many requests", [], None),
        ("", [], None),
    ],
)
def test_texts_of_refusals(message: str, stated: list[StatedLimit], after: float | None) -> None:
    assert limits_of_refusal(message) == stated
    assert retry_after_of_refusal(message) == (None if after is None else pytest.approx(after))


def makes_sense(limit: StatedLimit) -> bool:
    return (
        limit.limit > 0
        and (limit.remaining is None or limit.remaining >= 0)
        and (limit.reset is None or (limit.reset >= 0.0 and math.isfinite(limit.reset)))
        and (limit.window is None or limit.window > 0.0)
    )


names = st.sampled_from([*OPENAI, *ANTHROPIC, *MISTRAL, *CEREBRAS])
pieces = st.lists(
    st.sampled_from(["9", "0", "1", ".", "-", "e", "d", "h", "m", "s", "ms", ":", "T", "Z", "+", " ", "٣", "99999999"]),
    max_size=40,
).map("".join)


@given(st.dictionaries(st.one_of(names, st.text(max_size=50)), st.one_of(pieces, st.text(max_size=60)), max_size=8))
def test_no_header_raises_or_makes_no_sense(headers: dict[str, str]) -> None:
    assert all(makes_sense(limit) for limit in limits_of_headers(headers, NOW))


@given(
    st.one_of(st.text(max_size=300), pieces.map(lambda text: f"on tokens per min: Limit {text}, Used {text}. Retry"))
)
def test_no_text_of_a_refusal_raises_or_makes_no_sense(message: str) -> None:
    assert all(makes_sense(limit) for limit in limits_of_refusal(message))
    after = retry_after_of_refusal(message + " Please try again in " + message)
    assert after is None or (after >= 0.0 and math.isfinite(after))


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_numbers_without_end(digits: int) -> None:
    many = "9" * digits
    headers = dict.fromkeys((*OPENAI, *ANTHROPIC), many) | {"x-ratelimit-reset-tokens": many + "m" + many + "s"}
    assert all(makes_sense(limit) for limit in limits_of_headers(headers, NOW))
    assert all(makes_sense(limit) for limit in limits_of_refusal(f"on tokens per min: Limit {many}, Used {many}."))
    after = retry_after_of_refusal(f"try again in {many}s")
    assert after is None or math.isfinite(after)


@pytest.mark.parametrize(
    ("code", "message", "cause"),
    [
        ("rate_limit_exceeded", "Rate limit reached for m on requests per min (RPM): Limit 3, Used 3.", "rate"),
        ("rate_limit_exceeded", "Rate limit reached on tokens per min (TPM): Limit 30000.", "rate"),
        (None, "This request would exceed the limit of 50 requests per minute", "rate"),
        (None, "This request would exceed your organization's acceleration limit", "rise"),
        ("limit_burst_rate", "", "rise"),
        ("slow_down", "", "rise"),
        (None, "Request rate increased too quickly. Please scale requests more smoothly over time.", "rise"),
        (None, "Too many concurrent requests", "concurrency"),
        (None, "Number of in-flight requests exceeded", "concurrency"),
        (None, "Please slow down", None),
        (17, "Rate limit reached", None),
    ],
)
def test_what_a_refusal_blames(code: object, message: str, cause: str | None) -> None:
    assert cause_of_refusal(code, message) == cause
