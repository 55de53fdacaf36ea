"""Prices of the tokens of a model, in whole picodollars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from fractions import Fraction
from typing import TypeAlias

from batchwright.errors import InputError, shown

Picodollars: TypeAlias = int
"""Amount of money in units of 10⁻¹² dollars, so that every published price of a token is a whole number."""

DOLLAR: Picodollars = 10**12
_PER_MILLION = 10**6
"""Picodollars per token at one dollar per million tokens."""
_MOST_DOLLARS = 10**6
"""Largest amount that is accepted: a journal of amounts is JSON, whose whole numbers have 64 bits."""
_SMALL = DOLLAR // 10


@dataclass(frozen=True, slots=True)
class Rate:
    """Price of one token of a kind, which may depend on the length of its prompt."""

    base: Picodollars
    tiers: tuple[tuple[int, Picodollars], ...] = ()
    """Pairs of a number of prompt tokens and the price of every token in requests with more of them, ascending."""

    def at(self, prompt_tokens: int) -> Picodollars:
        """Return the price in a request with `prompt_tokens` prompt tokens."""
        price = self.base
        for above, dearer in self.tiers:
            if prompt_tokens > above:
                price = dearer
        return price

    def most(self, prompt_tokens: int) -> Picodollars:
        """Return the highest price in any request with at most `prompt_tokens` prompt tokens."""
        return max(self.base, *(price for above, price in self.tiers if above < prompt_tokens), 0)

    def times(self, factor: Fraction) -> Rate:
        """Return the rate at `factor` of its prices, rounded up."""
        return Rate(_up(self.base * factor), tuple((above, _up(price * factor)) for above, price in self.tiers))

    def dearer(self, other: Rate) -> Rate:
        """Return the rate that is, at each length, the higher of this one and `other`."""
        starts = sorted({above for above, _ in (*self.tiers, *other.tiers)})
        return Rate(
            max(self.base, other.base),
            tuple((above, max(self.at(above + 1), other.at(above + 1))) for above in starts),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Prices of the kinds of tokens of a model.

    A kind without a price of its own costs what `input` does; `cache_write_1h` costs what `cache_write` does.
    """

    input: Rate
    output: Rate
    cached: Rate | None = None
    """Price of prompt tokens that the provider found in its cache."""
    cache_write: Rate | None = None
    """Price of prompt tokens that the provider put into its cache."""
    cache_write_1h: Rate | None = None
    """Price of prompt tokens that it put there for an hour."""
    request: Picodollars = 0
    """Price of each request besides its tokens."""

    def times(self, factor: Fraction) -> Rates:
        """Return these prices times `factor`, rounded up."""

        def part(rate: Rate | None) -> Rate | None:
            return None if rate is None else rate.times(factor)

        return Rates(
            self.input.times(factor),
            self.output.times(factor),
            part(self.cached),
            part(self.cache_write),
            part(self.cache_write_1h),
            _up(self.request * factor),
        )

    def dearer(self, other: Rates) -> Rates:
        """Return prices that are nowhere below these or `other`."""

        def higher(own: Rate | None, theirs: Rate | None, own_else: Rate, theirs_else: Rate) -> Rate | None:
            return None if own is theirs is None else (own or own_else).dearer(theirs or theirs_else)

        one, two = self.input, other.input

        return Rates(
            one.dearer(two),
            self.output.dearer(other.output),
            higher(self.cached, other.cached, one, two),
            higher(self.cache_write, other.cache_write, one, two),
            higher(self.cache_write_1h, other.cache_write_1h, self.cache_write or one, other.cache_write or two),
            max(self.request, other.request),
        )

    def dearest_input(self, prompt_tokens: int) -> Picodollars:
        """Return the most that a prompt token can cost in a request with at most `prompt_tokens` of them."""
        kinds = (self.input, self.cached, self.cache_write, self.cache_write_1h)
        return max(rate.most(prompt_tokens) for rate in kinds if rate is not None)


@dataclass(frozen=True, slots=True)
class ModelPrices:
    """What a model costs."""

    live: Rates
    batch: Rates
    """Prices in the provider's batches."""
    tiers: Mapping[str, Rates] = field(default_factory=dict)
    """Prices by the `service_tier` that was requested and granted, if it is not the usual one."""

    @classmethod
    def of(cls, live: Rates, batch_factor: Fraction = Fraction(1, 2)) -> ModelPrices:
        """Return prices with batches at `batch_factor` of the live prices."""
        return cls(live, live.times(batch_factor))


PRICE_NAMES = tuple(each.name for each in fields(Rates) if each.name != "request")
"""Names that a user gives prices by."""


def per_million(dollars: Decimal) -> Picodollars:
    """Return the price of a token at `dollars` per million tokens, rounded up."""
    return int((dollars * _PER_MILLION).to_integral_value(ROUND_CEILING))


def picodollars(name: str, dollars: object) -> Picodollars:
    """Return an amount given in dollars, as a number or a text. Raises `InputError`, which names `name`."""
    try:
        amount = Decimal(str(dollars)) if not isinstance(dollars, bool) else Decimal("nan")
    except InvalidOperation:
        amount = Decimal("nan")
    if not amount.is_finite() or not 0 < amount <= _MOST_DOLLARS:
        raise InputError(
            f"{name}={shown(dollars)}: must be an amount in dollars above 0, at most {_MOST_DOLLARS:,}, such as 5.00"
        )
    return int(amount * DOLLAR)


def in_dollars(amount: Picodollars) -> float:
    """Return an amount as a number of dollars, to a thousandth of a microdollar."""
    return round(amount / DOLLAR, 9)


def shown_dollars(amount: Picodollars) -> str:
    """Return an amount as it is shown: to the cent or, below ten cents, with two significant digits."""
    if amount == 0 or abs(amount) >= _SMALL:
        return f"${amount / DOLLAR:,.2f}"
    digits = f"{amount / DOLLAR:.1e}"
    places = max(2, 1 - int(digits.partition("e")[2]))
    return f"${amount / DOLLAR:.{places}f}"


def money(dollars: float) -> str:
    """Return an amount in dollars as `shown_dollars` does, such as `$1.25`."""
    return shown_dollars(round(dollars * DOLLAR))


def _up(amount: Fraction) -> Picodollars:
    return -(-amount.numerator // amount.denominator)
