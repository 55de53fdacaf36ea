"""Published prices of providers, from the package `genai-prices`.

The package is imported when a price is first looked up, since importing takes a fifth of a second. It fetches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from difflib import get_close_matches
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from batchwright.pricing.rates import DOLLAR, ModelPrices, Rate, Rates, per_million

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider

_FIELDS = {
    "input": "input_mtok",
    "cached": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
    "cache_write_1h": "cache_write_1h_mtok",
}
_BY_OTHER_UNITS = frozenset({"input_mchars", "input_text_messages_kcount"})
"""Prices that do not depend on the number of tokens."""
_NEAR = 3
"""Number of similar names that are shown for an unknown one."""
_BATCH = {"processing": "batch"}
_FEW_DISCOUNTS = frozenset({"together"})
"""Providers whose batches are cheaper only for some models, which are not listed with the prices."""
_NO_CACHE_IN_BATCHES = frozenset({"groq"})
"""Providers whose batches give no discount for cached prompt tokens."""


def published_prices(
    model: str, *, at: datetime, address: str | None = None, provider: str | None = None
) -> ModelPrices | None:
    """Return the prices of a model at a provider, given by its name or by the address of its endpoint.

    A live price that depends on the time of day is the highest one. None if the provider, the model or its price is not
    known, or `genai-prices` is not installed.
    """
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ModuleNotFoundError:
        return None
    try:
        seller, found = get_snapshot().find_provider_model(model, None, provider, address)
    except LookupError:
        return None
    live = _rates(_possible(found, at))
    if live is None:
        return None
    batch = _batch_rates(seller, found, live, at)
    tiers: dict[str, Rates] = {}
    for variant in found.price_variants or ():
        tier = variant.when.get("service_tier")
        if tier is not None and len(variant.when) == 1:
            rates = _rates([vars(found.get_prices(at, {"service_tier": tier}))])
            if rates is not None:
                tiers[tier] = rates
    return ModelPrices(live, batch, tiers)


def near_names(name: str) -> list[str] | None:
    """Return the `PROVIDER/MODEL` names with published prices that are most similar to a name.

    None if `genai-prices` is not installed.
    """
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ModuleNotFoundError:
        return None
    asked = name.lower()
    whole = [f"{provider.id}/{model.id}" for provider in get_snapshot().providers for model in provider.models]
    if "/" not in asked:
        # A model without its provider: makers of a model mostly come before others that sell it.
        same = [each for each in whole if each.partition("/")[2] == asked]
        if same:
            return same[:_NEAR]
        models = dict.fromkeys(each.partition("/")[2] for each in whole)
        close = get_close_matches(asked, models, _NEAR)
        return [next(each for each in whole if each.partition("/")[2] == model) for model in close]
    return get_close_matches(asked, whole, _NEAR)


def is_provider(address: str) -> bool:
    """Return whether the endpoint at an address belongs to a provider with published prices."""
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ModuleNotFoundError:
        return False
    try:
        return get_snapshot().find_provider(None, None, address) is not None
    except LookupError:
        return False


def _possible(model: ModelInfo, at: datetime) -> list[Mapping[str, Any]]:
    """Return all prices that may apply on the day of `at`."""
    from genai_prices.types import ModelPrice, TimeOfDateConstraint

    if isinstance(model.prices, ModelPrice):
        return [vars(model.prices)]
    found: list[Mapping[str, Any]] = []
    for conditional in reversed(model.prices):
        if isinstance(conditional.constraint, TimeOfDateConstraint):
            found.append(vars(conditional.prices))
        elif conditional.constraint is None or conditional.constraint.active(at):
            found.append(vars(conditional.prices))
            return found
    return [*found, vars(model.prices[0].prices)] if model.prices else found


def _batch_rates(provider: Provider, model: ModelInfo, live: Rates, at: datetime) -> Rates:
    if any(variant.when == _BATCH for variant in model.price_variants or ()):
        return _rates([vars(model.get_prices(at, _BATCH))]) or live
    if provider.id in _NO_CACHE_IN_BATCHES:
        live = replace(live, cached=None, cache_write=None, cache_write_1h=None)
    return ModelPrices.of(live, _usual_batch_factor(provider, at)).batch


def _usual_batch_factor(provider: Provider, at: datetime) -> Fraction:
    """Return the most common ratio of the provider's published batch prices to its live ones; half if there are none.

    It is 1 if a batch may cost as much as its requests: a budget must hold.
    """
    if provider.id in _FEW_DISCOUNTS:
        return Fraction(1)
    found: Counter[Fraction] = Counter()
    for model in provider.models:
        if any(variant.when == _BATCH for variant in model.price_variants or ()):
            live, batch = _rates([vars(model.get_prices(at))]), _rates([vars(model.get_prices(at, _BATCH))])
            if live is not None and batch is not None and live.input.base:
                found[Fraction(batch.input.base, live.input.base)] += 1
    return found.most_common(1)[0][0] if found else Fraction(1, 2)


def _rates(possible: list[Mapping[str, Any]]) -> Rates | None:
    """Return the highest of the prices; None if one of them is not per token."""
    found: Rates | None = None
    for prices in possible:
        given = {name for name, price in prices.items() if price is not None}
        if "input_mtok" not in given or given & _BY_OTHER_UNITS:
            return None
        kinds = {name: _rate(prices[theirs]) for name, theirs in _FIELDS.items() if theirs in given}
        output = Rate(0)
        for name in ("output_mtok", "output_reasoning_mtok"):
            if name in given:
                output = output.dearer(_rate(prices[name]))
        request = Decimal(0) if "requests_kcount" not in given else _base(prices["requests_kcount"])
        rates = Rates(**kinds, output=output, request=int(request * DOLLAR) // 1000)
        found = rates if found is None else found.dearer(rates)
    return found


def _rate(price: Any) -> Rate:
    if isinstance(price, Decimal):
        return Rate(per_million(price))
    tiers = tuple((tier.start, per_million(tier.price)) for tier in price.tiers)
    return Rate(per_million(price.base), tiers)


def _base(price: Any) -> Decimal:
    return price if isinstance(price, Decimal) else max(price.base, *(tier.price for tier in price.tiers))
