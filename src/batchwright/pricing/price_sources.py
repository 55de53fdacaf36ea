"""Where prices come from: the user, a file of prices, or the published ones that come with `genai-prices`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from batchwright.errors import InputError, shown
from batchwright.pricing.rates import PRICE_NAMES, ModelPrices, Rate, Rates, per_million

_EXAMPLE = "input=2.50,cached=1.25,output=10.00"
_MOST_PRICE = 10**6
"""Dollars per million tokens: more is a mistake in the unit."""


class PriceBook:
    """The prices of models by name.

    - `given`: prices for all models, as text in the form of `given_prices`; or `PROVIDER/MODEL`, whose published prices
      apply to all models.
    - `table`: prices by model name, as `price_table` reads them; it takes precedence over published ones.
    - `address`: the URL of the endpoint, from which the provider is found whose published prices apply.
    - `at`: the time at which the prices apply, with its time zone.

    Raises `InputError` for prices that cannot be read.
    """

    def __init__(
        self,
        *,
        at: datetime,
        given: str | None = None,
        table: Mapping[str, ModelPrices] | None = None,
        address: str | None = None,
    ) -> None:
        self._at = at
        self._address = address
        self._table = dict(table or {})
        self._given: ModelPrices | None = None
        self._known: dict[str, ModelPrices | None] = {}
        if given is not None:
            self._given = given_prices(given) if "=" in given else self._named(given)

    @property
    def has_any(self) -> bool:
        """Whether the price of any model is known."""
        return self._given is not None or bool(self._table) or self._is_sold

    @cached_property
    def _is_sold(self) -> bool:
        """Whether the endpoint belongs to a provider with published prices."""
        host = urlsplit(self._address or "").hostname or ""
        if "." not in host or not host.rpartition(".")[2].isalpha():
            return False  # an IP address or a local name; the import below would take a fifth of a second
        from batchwright.pricing.published import is_provider

        return is_provider(self._address or "")

    def of(self, model: str | None) -> ModelPrices | None:
        """Return the prices of a model; None if they are not known."""
        if self._given is not None:
            return self._given
        if model is None or model in self._table:
            return None if model is None else self._table[model]
        if model not in self._known:
            found = None
            if self._address is not None and self._is_sold:
                from batchwright.pricing.published import published_prices

                found = published_prices(model, at=self._at, address=self._address)
            self._known[model] = found
        return self._known[model]

    def _named(self, name: str) -> ModelPrices:
        from batchwright.pricing.published import near_names, published_prices

        provider, slash, model = name.partition("/")
        found = published_prices(model, at=self._at, provider=provider) if slash else None
        if found is not None:
            return found
        near = near_names(name)
        if near is None:
            raise InputError(
                f"price={shown(name)}: published prices come with pip install 'batchwright[remote]'; without them, "
                f"give {_EXAMPLE}, in dollars per million tokens"
            )
        closest = f" (near: {', '.join(near)})" if near else ""
        raise InputError(
            f"price={shown(name)}: no PROVIDER/MODEL of published prices{closest}; give what it costs in dollars per "
            f"million tokens, {_EXAMPLE}, or --prices FILE"
        )


def given_prices(text: str) -> ModelPrices:
    """Read prices such as `input=2.50,cached=1.25,output=10.00`, in dollars per million tokens.

    `cache_write` and `cache_write_1h` are further kinds of tokens, and `batch` is the share of these prices that
    batches cost, 0.5 by default. Raises `InputError`.
    """
    values: dict[str, object] = {}
    for part in text.split(","):
        name, sign, value = (each.strip() for each in part.partition("="))
        if not sign or name in values:
            raise InputError(f"price={shown(text)}: must be a list of names and prices, such as {_EXAMPLE}")
        values[name] = value
    return _prices("price", values)


def price_table(content: bytes, name: str) -> dict[str, ModelPrices]:
    """Read a file of prices: for each model a table with the names of `given_prices`, in TOML or JSON.

    `name` is the name of the file: one that ends in `.json` is JSON. Raises `InputError`.
    """
    try:
        text = content.decode()
        read = (
            json.loads(text, parse_float=Decimal)
            if name.endswith(".json")
            else tomllib.loads(text, parse_float=Decimal)
        )
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"prices {name} cannot be read as {'JSON' if name.endswith('.json') else 'TOML'}: {error}"
        ) from error
    if not isinstance(read, dict) or not read:
        raise InputError(f"prices {name} must have a table of prices for each model, such as [gpt-4o] {_EXAMPLE}")
    for model, values in read.items():
        if not isinstance(values, dict):
            raise InputError(f"prices {name}: {model!r} is {shown(values)}: must be a table such as {_EXAMPLE}")
    return {model: _prices(f"prices {name}, model {model!r}", values) for model, values in read.items()}


def _prices(where: str, values: Mapping[str, object]) -> ModelPrices:
    for name in values:
        if name not in (*PRICE_NAMES, "batch"):
            raise InputError(f"{where} has {name!r}: choose from {', '.join(PRICE_NAMES)}, batch")
    rates: dict[str, Any] = {}
    for name in PRICE_NAMES:
        if name in values:
            rates[name] = Rate(per_million(_number(where, name, values[name], _MOST_PRICE)))
        elif name in ("input", "output"):
            raise InputError(f"{where} lacks {name}: give its dollars per million tokens, 0 where there is none")
    factor = Fraction(_number(where, "batch", values.get("batch", "0.5"), 1))
    return ModelPrices.of(Rates(**rates), factor)


def _number(where: str, name: str, value: object, most: int) -> Decimal:
    try:
        number = Decimal("nan") if isinstance(value, bool) else Decimal(str(value))
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or not 0 <= number <= most:
        unit = "the part of the live price, 0 to 1" if name == "batch" else f"dollars per million tokens, 0 to {most:,}"
        raise InputError(f"{where}: {name}={shown(value)} must be {unit}")
    return number
