"""Rate limits that an endpoint states in the headers of an answer or in the text of a refusal.

The following are read, with names and units as their owners document them:

- OpenAI's headers, and those of all that copy them (Azure, Groq, Mistral, Together, Fireworks, vLLM gateways, LiteLLM):
  `x-ratelimit-limit-requests`, `-remaining-requests` and `-reset-requests`, the same for `tokens`, and with a window in
  the name as Mistral (`x-ratelimit-limit-req-minute`) and Cerebras (`x-ratelimit-limit-requests-day`) have it,
  or `tokens-prompt` and `tokens-generated`, as Fireworks has them;
  resets are durations such as `1s`, `6m0s`, `120ms`, seconds, or times, in seconds or milliseconds too;
- Anthropic's: `anthropic-ratelimit-requests-limit`, `-remaining` and `-reset`, the same for `tokens`, `input-tokens`
  and `output-tokens`; resets are times in RFC 3339;
- the text of OpenAI's 429: "… on tokens per min (TPM): Limit 30000, Used 29000, Requested 1500. Please try again in
  1s"; and the cause, as far as a refusal's code or text states it: a rate, the number of requests at once, or how
  fast usage rises (OpenAI's `slow_down`, Anthropic's acceleration limits, Alibaba's `limit_burst_rate`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

RateKind: TypeAlias = Literal["requests", "tokens", "input_tokens", "output_tokens"]
"""What is counted; `tokens` are those of prompts and answers together."""

RefusalCause: TypeAlias = Literal["rate", "concurrency", "rise"]
"""Why a request is refused: too many in a time, too many at once, or usage that rises too fast."""


@dataclass(frozen=True, slots=True)
class StatedLimit:
    """A rate limit as an answer states it."""

    kind: RateKind
    limit: int
    """Amount that may be used in a window."""
    remaining: int | None = None
    """What is left of it; None: not stated."""
    reset: float | None = None
    """Seconds until all of it is available again if nothing more is used; None: not stated."""
    window: float | None = None
    """Length of the window in seconds; None: not stated."""


_KINDS: Mapping[str, RateKind] = {
    "requests": "requests",
    "req": "requests",
    "tokens": "tokens",
    "input-tokens": "input_tokens",
    "output-tokens": "output_tokens",
    "tokens-prompt": "input_tokens",
    "tokens-generated": "output_tokens",
}
_WINDOWS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
_OPENAI = re.compile(
    r"x-ratelimit-limit-(requests|req|tokens|input-tokens|output-tokens|tokens-prompt|tokens-generated)"
    r"(-(?:second|minute|hour|day))?",
    re.ASCII,
)
_ANTHROPIC = re.compile(r"anthropic-ratelimit-(requests|tokens|input-tokens|output-tokens)-limit", re.ASCII)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?", re.ASCII)
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,20})?", re.ASCII)
_LARGEST = 10**15
_EPOCH = 10**9
"""Numbers of seconds from here on are times, not durations."""
_EPOCH_MILLISECONDS = 10**11
"""Numbers from here on are times in milliseconds."""
_BODY = re.compile(
    r"(requests|tokens|input tokens|output tokens) per (sec|min|hour|day)\w*.{0,40}?Limit:? (\d[\d,]*\b)"
    r"(?:, (?:Used|Current):? (\d[\d,]*\b))?",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_BODY_WINDOWS = {"sec": 1.0, "min": 60.0, "hour": 3600.0, "day": 86400.0}
_AGAIN = re.compile(
    r"(?:try again|retry) (?:in|after) "
    r"(?:((?:\d+(?:\.\d+)?(?:ms|[dhms]))+)\b|(\d+(?:\.\d+)?) ?(milliseconds?|seconds?|minutes?|hours?|days?)\b)",
    re.ASCII,
)
_UNITS = {
    **dict.fromkeys(("millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("second", "seconds"), 1.0),
    **dict.fromkeys(("minute", "minutes"), 60.0),
    **dict.fromkeys(("hour", "hours"), 3600.0),
    **dict.fromkeys(("day", "days"), 86400.0),
}
_RISE_CODES = frozenset({"slow_down", "limit_burst_rate"})
_CAUSES: tuple[tuple[RefusalCause, re.Pattern[str]], ...] = (
    ("rise", re.compile(r"(?:increas|ris|grow)\w* too (?:quick|fast)|acceleration|sudden increase")),
    ("concurrency", re.compile(r"concurren|simultaneous|under way|in[- ]flight|parallel requests")),
    ("rate", re.compile(r"per[- ](?:second|sec\b|minute|min\b|hour|day)|\b[rtqi]p[smhd]\b")),
)
_READ = 2000
"""Characters of a message that are looked at."""


def limits_of_headers(headers: Mapping[str, str], unix_time: float) -> list[StatedLimit]:
    """Return the limits that `headers`, of an answer that arrived at `unix_time`, state. Their names are lower case.

    Invalid values are ignored: a header is no reason to lose an answer.
    """
    found = []
    for name, text in headers.items():
        if match := _OPENAI.fullmatch(name):
            rest = name.removeprefix("x-ratelimit-limit-")
            others = f"x-ratelimit-remaining-{rest}", f"x-ratelimit-reset-{rest}"
            kind, window = match[1], match[2]
        elif match := _ANTHROPIC.fullmatch(name):
            stem = name.removesuffix("-limit")
            others = f"{stem}-remaining", f"{stem}-reset"
            kind, window = match[1], None
        else:
            continue
        limit = _whole(text)
        if limit:
            remaining, reset = _whole(headers.get(others[0])), seconds_until(headers.get(others[1]), unix_time)
            seconds = None if window is None else _WINDOWS[window.removeprefix("-")]
            found.append(StatedLimit(_KINDS[kind], limit, remaining, reset, seconds))
    # Anthropic's `tokens` repeat the tightest of the limits on tokens, which may be the one on input or on output.
    named = {(each.limit, each.remaining) for each in found if each.kind in ("input_tokens", "output_tokens")}
    return [each for each in found if each.kind != "tokens" or (each.limit, each.remaining) not in named]


def limits_of_refusal(message: str) -> list[StatedLimit]:
    """Return the limits that the message of a 429 states."""
    found = []
    for kind, unit, limit, used in _BODY.findall(message[:_READ]):
        most = _whole(limit.replace(",", ""))
        taken = _whole(used.replace(",", "")) if used else None
        if most:
            remaining = None if taken is None else max(0, most - taken)
            name = _KINDS[kind.lower().replace(" ", "-")]
            found.append(StatedLimit(name, most, remaining, window=_BODY_WINDOWS[unit.lower()]))
    return found


def cause_of_refusal(code: object, message: str) -> RefusalCause | None:
    """Return the cause that the code and the message of a refusal state; None if they state none."""
    if isinstance(code, str) and code in _RISE_CODES:
        return "rise"
    text = message[:_READ].lower()
    return next((cause for cause, pattern in _CAUSES if pattern.search(text)), None)


def retry_after_of_refusal(message: str) -> float | None:
    """Return the seconds after which the message of a refusal asks to try again; None if it does not say."""
    match = _AGAIN.search(message[:_READ].lower())
    if match is None:
        return None
    seconds = seconds_until(match[1], 0.0) if match[1] else float(match[2]) * _UNITS[match[3]]
    return seconds if seconds is not None and math.isfinite(seconds) else None


def seconds_until(text: str | None, unix_time: float) -> float | None:
    """Return the seconds from `unix_time` until what a reset header states: a duration or a time; None for neither."""
    if not text:
        return None
    text = text.strip()
    if _NUMBER.fullmatch(text):
        number = float(text)
        if number >= _EPOCH_MILLISECONDS:
            number /= 1e3
        return max(0.0, number - unix_time) if number >= _EPOCH else number
    match = _DURATION.fullmatch(text)
    if match is not None and any(match.groups()):
        days, hours, minutes, seconds, milliseconds = (float(each or 0.0) for each in match.groups())
        total = days * 86400 + hours * 3600 + minutes * 60 + seconds + milliseconds / 1e3
        return total if math.isfinite(total) else None
    try:
        time = datetime.fromisoformat(text)
        return max(0.0, (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() - unix_time)
    except (ValueError, OverflowError):
        return None


def _whole(text: str | None) -> int | None:
    if text is None or not _NUMBER.fullmatch(text.strip()):
        return None
    return min(int(float(text)), _LARGEST)
