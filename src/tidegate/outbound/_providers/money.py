"""Limits that count money: `25/day unit=usd` is read as 25,000,000 `usd_micros` per calendar day."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidegate._policy.units import COMMON_CURRENCIES, MILLION, is_money
from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._limit import Limit
from tidegate.errors import ConfigError
from tidegate.outbound._providers.prices import CURRENCY

if TYPE_CHECKING:
    from collections.abc import Collection

    from tidegate.outbound._providers.prices import Prices

# An amount with decimals, and the rest: `2.50/day unit=usd`.
AMOUNT = re.compile(r"\s*(?P<whole>[0-9][0-9_]*)\.(?P<part>[0-9]{1,6})(?P<rest>[^0-9].*)", re.DOTALL)
WORD = re.compile(r"[^\W\d_]+")
MONEY_WORDS: Final = ("dollar", "euro", "pound", "franc", "rupee", "cent", "micro", "money")  # or with a final `s`


def parse_limit(text: str, prices: Prices | None) -> Limit:
    """Parse a limit that may count the currency of the prices; its amount may then have decimals."""
    amount = AMOUNT.fullmatch(text)
    scale = 1 if amount is None else 10 ** len(amount["part"])
    # An amount with decimals is read without its dot, and divided afterwards.
    whole = text if amount is None else f"{amount['whole']}{amount['part']}{amount['rest']}"
    limit = Limit.parse(whole)
    found = to_micros(limit, prices, scale)
    if scale > 1 and found is limit:
        check_unit(limit.unit, prices)
        raise ConfigError(f"expected a whole number of {limit.unit}, in {text!r}", field="limit")
    return found


def to_micros(limit: Limit, prices: Prices | None, scale: int = 1) -> Limit:
    """Return a limit in the currency of the prices as one in micros; others as they are.

    `scale` is what the quota was multiplied with, to read an amount with decimals as an integer.
    """
    if prices is None or limit.unit != prices.currency:
        return limit
    quota = limit.quota * MILLION // scale
    if not 1 <= quota <= MAX_INTEGER:
        raise ConfigError(
            f"must be from 0.000001 to {MAX_INTEGER // MILLION} {prices.currency}, not {limit.quota / scale:.15g}",
            field="quota",
        )
    burst = limit.burst * MILLION // scale if limit.burst != limit.quota else 0
    return replace(limit, quota=quota, burst=burst, unit=prices.unit)


def check_unit(unit: str, prices: Prices | None, told: Collection[str] = ()) -> None:
    """Refuse a unit of money that nothing counts; `told` are the units whose cost the provider file states."""
    if prices is not None:
        _check_currency(unit, prices, told)
    elif unit in told:
        return
    elif is_money(unit):
        message = f"a limit counts {unit}, but nothing says what a call costs: add price: prices.yaml"
        raise ConfigError(f"{message}, a file with the price of each model, or estimate: {{{unit}: …}}")
    elif unit in COMMON_CURRENCIES:
        raise ConfigError(
            f"a limit counts {unit}, but nothing says what a call costs: add price: prices.yaml, a file with the price "
            "of each model"
        )


def _check_currency(unit: str, prices: Prices, told: Collection[str]) -> None:
    """Refuse another currency than that of the prices, a misspelled one, and any other unit of three letters."""
    is_other_currency = is_money(unit) or unit in COMMON_CURRENCIES
    if unit in (prices.currency, prices.unit) or (unit in told and not is_other_currency):
        return
    words = WORD.findall(unit.lower())
    is_own = prices.currency in words
    if not (is_own or CURRENCY.fullmatch(unit.lower()) or (words and words[-1].removesuffix("s") in MONEY_WORDS)):
        return
    other = f"a limit counts {unit}, but the prices are in {prices.currency}"
    reason = f"nothing is counted in the unit {unit!r}" if is_own else other
    meant = prices.unit if "micro" in unit.lower() else prices.currency
    raise ConfigError(f"{reason}: did you mean {meant!r}?")
