"""Units of money: a limit of `25/day unit=usd` counts 25,000,000 `usd_micros`, millionths of the currency."""

from __future__ import annotations

from typing import Final

MICROS: Final = "_micros"  # ends a unit that counts millionths of a currency
MILLION: Final = 10**6
COMMON_CURRENCIES: Final = ("usd", "eur", "gbp", "chf", "jpy", "cny", "inr", "cad", "aud")


def is_money(unit: str) -> bool:
    """Return whether a unit counts millionths of a currency, such as `usd_micros`."""
    return unit.endswith(MICROS)


def currency_of(unit: str) -> str:
    """Return the currency whose millionths a unit counts."""
    return unit.removesuffix(MICROS)
