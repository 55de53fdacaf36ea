"""The most that a request may cost, from its body alone.

Every token of a byte-level vocabulary stands for at least one byte of the text, and JSON never shortens a text. So the
bytes of the body bound the tokens of the prompt, except for those that a chat template adds by itself. If no such bound
holds, as for images, the request is refused, naming the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from batchwright.errors import InvalidRequest, shown
from batchwright.pricing.rates import ModelPrices, Picodollars, Rates
from batchwright.pricing.usage import is_usual_tier
from batchwright.wire.classifying import pair_fields
from batchwright.wire.fields import ANSWER_LIMITS
from batchwright.wire.requests import ENCODER_URLS, PAIR_FIELDS, RERANK_URL, SCORE_URL

NO_ANSWER_BOUND = "max_tokens_missing"
"""Error code for a request that does not say how long its answer may be."""
_TEMPLATE_TOKENS = 256
"""Tokens that a template adds to a prompt beyond what the JSON around it makes up for, such as its own system message:
those of Qwen, Llama and gpt-oss have fewer than 100."""
_TOOLS_TEMPLATE_TOKENS = 1024
"""The same if there are tools: Anthropic states up to 530."""
_BOUNDED_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_BOUNDED_ITEMS = frozenset({None, "message", "function_call", "function_call_output"})
_BOUNDED_TOOLS = frozenset({None, "function", "custom"})
_UNBOUNDED = frozenset(
    {
        "audio",
        "container",
        "conversation",
        "mcp_servers",
        "plugins",
        "prediction",
        "previous_response_id",
        "search_parameters",
        "web_search_options",
    }
)
"""Fields that cost more than the bytes of the body and the tokens of the answer."""
_REMEDY = "leave it out, or run without a budget"


def most_cost(
    endpoint: str, body: Mapping[str, Any], size: int, prices: ModelPrices, *, batch: bool = False
) -> Picodollars:
    """Return the most that a request with this body, of `size` bytes as JSON, may cost.

    Raises `InvalidRequest` if there is no such bound, naming the field.
    """
    _require_bounded(body)
    prompt = (
        size
        + _repeated(endpoint, body)
        + (_TOOLS_TEMPLATE_TOKENS if body.get("tools") or body.get("functions") else _TEMPLATE_TOKENS)
    )
    rates = prices.batch if batch else _dearest(prices, body.get("service_tier"))
    output = 0 if endpoint in ENCODER_URLS else most_output(body)
    return rates.request + prompt * rates.dearest_input(prompt) + output * rates.output.most(prompt)


def _repeated(endpoint: str, body: Mapping[str, Any]) -> int:
    """Return the most tokens that the pairs of a body add beyond its bytes.

    The first text of several pairs is repeated in each of them; if a chat model ranks, each pair has its own template.
    """
    if endpoint not in (RERANK_URL, SCORE_URL):
        return 0
    names = ("query", "documents") if endpoint == RERANK_URL else pair_fields(body)
    first, second = body.get(names[0]), body.get(names[1])
    pairs = len(second) if isinstance(second, list) else 1
    again = 0 if isinstance(first, list) and len(first) > 1 else (pairs - 1) * _bytes_of(first)
    return again + pairs * _TEMPLATE_TOKENS


def _bytes_of(value: object) -> int:
    return len(msgspec.json.encode(value))


def most_output(body: Mapping[str, Any]) -> int:
    """Return the most tokens that all completions of a body may have. Raises `InvalidRequest` if it states no limit."""
    given = [body[name] for name in ANSWER_LIMITS if body.get(name) is not None]
    if not given:
        raise InvalidRequest(
            "max_tokens is missing, so what the answer may cost has no bound: under a budget every request needs one; "
            "give it in the line, or for all lines with --max-tokens",
            param="max_tokens",
            code=NO_ANSWER_BOUND,
        )
    for limit in given:
        if type(limit) is not int or limit < 0:
            raise InvalidRequest(f"max_tokens={shown(limit)}: must be a whole number, at least 0", param="max_tokens")
    longest: int = max(given)
    return longest * _completions(body)


def _completions(body: Mapping[str, Any]) -> int:
    each = 1
    for name in ("n", "best_of"):
        number = body.get(name)
        if number is not None and (type(number) is not int or number < 1):
            raise InvalidRequest(f"{name}={shown(number)}: must be a whole number above 0", param=name)
        each = max(each, number or 1)
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return each * (len(prompt) if several and isinstance(prompt, list) else 1)


def _dearest(prices: ModelPrices, tier: object) -> Rates:
    if is_usual_tier(tier):
        return prices.live
    rates = prices.tiers.get(tier) if isinstance(tier, str) else None
    if rates is None:
        raise InvalidRequest(f"service_tier={shown(tier)}: its price is not known; {_REMEDY}", param="service_tier")
    return rates.dearer(prices.live)  # the endpoint may fall back to the usual tier


def _require_bounded(body: Mapping[str, Any]) -> None:
    for name in sorted(_UNBOUNDED & body.keys()):
        if body.get(name) is not None:
            raise InvalidRequest(f"{name}: what it costs has no bound; {_REMEDY}", param=name)
    if isinstance(body.get("prompt"), Mapping):
        raise InvalidRequest(f"prompt: that of a stored prompt has no bound; {_REMEDY}", param="prompt")
    for name in ("query", "documents", *{name: None for names in PAIR_FIELDS for name in names}):
        value = body.get(name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping) and each.keys() - {"text"}:
                raise InvalidRequest(f"{name} has more than texts, whose tokens have no bound; {_REMEDY}", param=name)
    for name in ("messages", "input"):
        for where, kind in _unbounded_parts(name, body.get(name)):
            raise InvalidRequest(
                f"{where} is of type {shown(kind)}, whose tokens have no bound; {_REMEDY}", param=where
            )
    for position, tool in enumerate(_items(body.get("tools"))):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not _is_one_of(kind, _BOUNDED_TOOLS):
            raise InvalidRequest(
                f"tools[{position}] is of type {shown(kind)}: what the endpoint's own tools cost has no bound; "
                f"{_REMEDY}",
                param="tools",
            )


def _unbounded_parts(name: str, messages: object) -> Iterator[tuple[str, object]]:
    """Yield the location and type of each message or item, and of each part of one, that is not known to be text."""
    for position, message in enumerate(_items(messages)):
        if not isinstance(message, Mapping):
            continue  # a text to embed, or a token id
        kind = message.get("type")
        if not _is_one_of(kind, _BOUNDED_ITEMS):
            yield f"{name}[{position}]", kind
        for field in ("content", "output"):
            content = message.get(field)
            if content is not None and not isinstance(content, (str, list)):
                yield f"{name}[{position}].{field}", type(content).__name__
            for place, part in enumerate(_items(content)):
                kind = part.get("type") if isinstance(part, Mapping) else "text"
                if not _is_one_of(kind, _BOUNDED_PARTS):
                    yield f"{name}[{position}].{field}[{place}]", kind


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_one_of(kind: object, known: frozenset[Any]) -> bool:
    return (kind is None and None in known) or (isinstance(kind, str) and kind in known)
