"""Reports: sums of a ledger by day, model, team and others; as rows, CSV or JSON. And forecasts of ceilings."""

from __future__ import annotations

import csv
import io
import unicodedata
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._policy.units import currency_of, is_money
from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError
from tidegate.spending._ledger import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.spending._ledger import SpendingEntry

DIMENSIONS: Final = ("day", "source", "member", "model", "team", "tag")
SUMS: Final = ("calls", "amount", "overrun")
CENT: Final = 10_000  # micros
FORMULA_STARTS: Final = ("=", "+", "-", "@")  # a spreadsheet would evaluate these as formulas, also after white space


class SpendingForecast(NamedTuple):
    """The pace of a ceiling per hour, and in how many seconds it is reached at this pace; None: not in this window."""

    pace: float
    reached_in: float | None


def parse_dimensions(text: str) -> tuple[str, ...]:
    """Read `model,team,day`; raises ConfigError for an unknown name, or one that is given twice."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in DIMENSIONS:
            advice = did_you_mean(name, DIMENSIONS) or f"expected {', '.join(DIMENSIONS)}"
            raise ConfigError(f"unknown column {name!r}: {advice}", field="--by")
    if len(set(names)) < len(names) or not names:
        raise ConfigError(f"expected different columns, such as model,team,day, not {text!r}", field="--by")
    return names


def sum_entries(entries: Iterable[SpendingEntry], by: Sequence[str]) -> list[dict[str, Any]]:
    """Sum entries by these columns, and by their unit, in the order of the columns."""
    sums: dict[tuple[str, ...], list[int]] = {}
    columns = (*by, "unit")
    places = [COLUMNS.index(name) for name in columns]
    for entry in entries:
        totals = sums.setdefault(tuple(str(entry[place]) for place in places), [0, 0, 0])
        for index, name in enumerate(SUMS):
            totals[index] += getattr(entry, name)
    rows = []
    for key, totals in sorted(sums.items()):
        row: dict[str, Any] = {**dict(zip(columns, key, strict=True)), **dict(zip(SUMS, totals, strict=True))}
        rows.append(row)
    return rows


def format_amount(amount: int, unit: str) -> str:
    """Write an amount: money in its currency, with six decimals at most."""
    if not is_money(unit):
        return f"{amount:,} {unit}"
    return f"{format_money(amount)} {currency_of(unit)}"


def format_money(micros: int) -> str:
    """Write money without its currency, with two to six decimals."""
    whole, part = divmod(abs(micros), 10**6)
    decimals = f"{part:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if micros < 0 else ''}{whole:,}.{decimals}"


def short_money(micros: int) -> str:
    """Write money for a table, without its currency: in cents, or below one cent with two significant digits.

    So a small amount is not shown as 0.00. `formatMoney` of the dashboard (static/format.js) does the same.
    """
    size = abs(micros)
    step = CENT if size >= CENT else 10 ** max(0, len(str(size)) - 2)
    rounded = (size + step // 2) // step * step
    return format_money(-rounded if micros < 0 else rounded)


def to_csv(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Write rows as CSV, with a header.

    A value that a spreadsheet would evaluate as a formula gets an apostrophe; control characters become `?`.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _safe(value) for name, value in row.items()})
    return text.getvalue()


def _safe(value: object) -> object:
    if not isinstance(value, str):
        return value
    shown = "".join("?" if unicodedata.category(character) == "Cc" else character for character in value)
    start = value.lstrip()
    return f"'{shown}" if start.startswith(FORMULA_STARTS) else shown


def forecast_ceiling(used: int, quota: int, elapsed: float, left: float) -> SpendingForecast:
    """Forecast a ceiling from what was used since its window began, `elapsed` seconds before; it ends after `left`."""
    pace = used / elapsed if elapsed > 0 else 0.0
    if used >= quota:
        return SpendingForecast(pace * 3600, 0.0)
    reached = (quota - used) / pace if pace else None
    return SpendingForecast(pace * 3600, reached if reached is not None and reached < left else None)
