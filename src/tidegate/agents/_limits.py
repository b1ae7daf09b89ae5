"""The limits of a node, and the costs of its calls: `5/run unit=usd` counts 5,000,000 `usd_micros` for its whole life.

A limit per run is a fixed window that is longer than the life of the node. The window opens at the first charge, so it
ends after the node does, and never refills while the node accepts calls. Each node also counts every unit that an
ancestor limits, and its calls, so that the tree shows what each node has used: COUNTED is the quota of a limit that
only counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Final

from tidegate._policy.units import COMMON_CURRENCIES, MICROS, MILLION
from tidegate._runtime.suggestions import hint
from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._limit import Limit
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Amount = int | float | str | Decimal
RunCost = int | Mapping[str, Amount]

COUNTED: Final = MAX_INTEGER  # the quota of a limit that counts and never denies
RUN_LIMIT = re.compile(
    r"\s*(?P<amount>[0-9][0-9_]*(?:\.[0-9]+)?)\s*(?P<unit>(?!per\b)[^\W\d][\w:.-]*)?\s*(?:/|\bper\b)\s*run\b(?P<rest>.*)",
    re.DOTALL,
)
CALLS: Final = "requests"
MAX_LABEL: Final = 100  # characters of what a call was for, such as a tool or a model
MAX_REPEATS: Final = 1_000_000
MAX_SHOWN: Final = 64  # characters of an amount that a message shows; bits of an integer


def read_limits(rules: str | Limit | Iterable[str | Limit]) -> tuple[str, ...]:
    """Check the limits of a node; returns them as strings, those per run in units that are counted."""
    if isinstance(rules, (str, Limit)):
        rules = (rules,)
    if not isinstance(rules, Iterable):
        raise ConfigError(f"expected limits such as '5/run unit=usd', not {rules!r}", field="limits")
    texts = tuple(_normal_text(rule) for rule in rules)
    limits = build_limits(texts, timedelta(days=1))
    names = [limit.name for limit in limits]
    for text, limit in zip(texts, limits, strict=True):
        # The counter of a unit has this name: a limit of another kind in its place would hide the unit.
        if limit.name.endswith("-run") and (limit.name != run_name(limit.unit) or RUN_LIMIT.fullmatch(text) is None):
            message = f"only a limit per run in {limit.name.removesuffix('-run')!r} is named {limit.name!r}: rename it"
            raise ConfigError(message, field="limits")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two limits are named {name!r}: rename one, as in '5/run name=a'", field="limits")
    return texts


def _normal_text(rule: str | Limit) -> str:
    if isinstance(rule, Limit):
        return str(_in_micros(rule))
    if not isinstance(rule, str):
        raise ConfigError(f"expected a limit such as '5/run unit=usd', not {rule!r}", field="limits")
    match = RUN_LIMIT.fullmatch(rule)
    if match is None:
        return str(_in_micros(Limit.parse(rule)))
    unit, name = match["unit"] or "", ""
    for word in match["rest"].split():
        option, _, value = word.partition("=")
        if option == "unit" and value and not unit:
            unit = value
        elif option == "name" and value and not name:
            name = value
        else:
            message = f"unexpected {word!r} in {rule!r}: a limit per run has the options unit= and name="
            raise ConfigError(message, field="limits")
    unit, quota = to_counted(unit or CALLS, match["amount"].replace("_", ""), "limits")
    if not 1 <= quota < COUNTED:
        raise ConfigError(f"expected an amount of at least one in {rule!r}", field="limits")
    return f"{quota}/run unit={unit} name={name or run_name(unit)}"


def run_name(unit: str) -> str:
    """Return the default name of a limit per run."""
    return f"{unit}-run"


def _in_micros(limit: Limit) -> Limit:
    """Return a limit in a currency as one in millionths of it."""
    if limit.unit not in COMMON_CURRENCIES:
        return limit
    burst = 0 if limit.burst == limit.quota else limit.burst * MILLION
    return replace(limit, quota=limit.quota * MILLION, burst=burst, unit=limit.unit + MICROS, name=limit.name)


def build_limits(texts: Sequence[str], window: timedelta) -> list[Limit]:
    """Return the limits of a node; those per run have a window of this length."""
    found = []
    for text in texts:
        match = RUN_LIMIT.fullmatch(text)
        if match is None:
            found.append(Limit.parse(text))
            continue
        options = dict(word.split("=", 1) for word in match["rest"].split())
        found.append(Limit(int(match["amount"]), window, "fixed_window", unit=options["unit"], name=options["name"]))
    return found


def add_counters(limits: Iterable[Limit], units: Iterable[str], window: timedelta) -> tuple[Limit, ...]:
    """Return limits, and one that only counts for each unit that none of them counts per run."""
    own = list(limits)
    counted = {(limit.name, limit.unit) for limit in own}
    missing = [unit for unit in dict.fromkeys(units) if (run_name(unit), unit) not in counted]
    return (*own, *(Limit(COUNTED, window, "fixed_window", unit=unit, name=run_name(unit)) for unit in missing))


def is_per_run(texts: Sequence[str], name: str, unit: str) -> bool:
    """Return whether the limit of this name and unit is per run."""
    return {"name": name, "unit": unit} in map(_options, texts)


def _options(text: str) -> dict[str, str]:
    """Return the unit and the name of a limit per run; of others, nothing."""
    match = RUN_LIMIT.fullmatch(text)
    return {} if match is None else dict(word.split("=", 1) for word in match["rest"].split())


def raise_quotas(texts: Sequence[str], more: Mapping[str, int], name: str = "") -> tuple[str, ...]:
    """Add to the quotas per run of some units; raises ConfigError if a unit has none.

    Of several limits of a unit, the one of this name is raised, by default the first.
    """
    found, left = [], dict(more)
    named = next((own["unit"] for own in map(_options, texts) if own and own["name"] == name), None)
    for text in texts:
        match, own = RUN_LIMIT.fullmatch(text), _options(text)
        unit = own.get("unit")
        if match is None or unit not in left or (unit == named and own["name"] != name):
            found.append(text)
            continue
        quota = int(match["amount"]) + left.pop(unit)
        if quota >= COUNTED:
            raise ConfigError(f"{quota} {unit} cannot be counted", field="extend")
        found.append(f"{quota}/run{match['rest']}")
    if left:
        raise ConfigError(f"the node has no limit per run in {', '.join(left)}", field="extend")
    return tuple(found)


def read_extension(more: Mapping[str, Amount]) -> dict[str, int]:
    """Return amounts by which quotas are raised, by counted unit."""
    if not isinstance(more, Mapping):
        raise ConfigError(f"must be amounts by unit, such as {{'usd': '0.05'}}, not {more!r}", field="extend")
    return dict(to_counted(unit, amount, "extend") for unit, amount in more.items())


def read_repeats(value: int | None) -> int:
    """Return how often the same request may be made; 0: as often as one likes."""
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_REPEATS:
        raise ConfigError(f"must be an integer of 1 to {MAX_REPEATS}, not {value!r}", field="max_repeats")
    return value


def read_label(label: str) -> str:
    """Check what a call is for."""
    if not isinstance(label, str) or len(label) > MAX_LABEL or not label.isprintable():
        raise ConfigError(f"must be at most {MAX_LABEL} printable characters, not {label!r}", field="label")
    return label


def to_counted(unit: str, amount: Amount, field: str = "cost") -> tuple[str, int]:
    """Return a unit and an amount as they are counted: money in millionths, rounded up, all else in integers."""
    if unit in COMMON_CURRENCIES:
        return unit + MICROS, int((_decimal(unit, amount, field) * MILLION).to_integral_value(ROUND_CEILING))
    number = _decimal(unit, amount, field)
    if number != number.to_integral_value():
        raise ConfigError(f"must be an integer of {unit}, not {amount!r}", field=field)
    return unit, int(number)


def _decimal(unit: str, amount: Amount, field: str) -> Decimal:
    try:
        number = Decimal(str(amount)) if isinstance(amount, (int, float, str, Decimal)) else Decimal("NaN")
    except (ValueError, ArithmeticError):  # ValueError: an integer of too many digits
        number = Decimal("NaN")
    if isinstance(amount, bool) or not number.is_finite() or not 0 <= number <= MAX_INTEGER:
        huge = isinstance(amount, int) and amount.bit_length() > MAX_SHOWN
        shown = f"an integer of {int(amount).bit_length()} bits" if huge else repr(amount)[:MAX_SHOWN]
        raise ConfigError(f"must be a number of {unit}, not {shown}", field=field)
    return number


def read_cost(cost: RunCost, units: Iterable[str], *, calls: int | None = None) -> dict[str, int]:
    """Return a cost by counted unit; an integer counts calls. Raises ConfigError for a unit that no node counts.

    `calls` is what a mapping costs in requests if it does not say so.
    """
    if not isinstance(cost, Mapping):
        return {CALLS: to_counted(CALLS, cost)[1]}
    found = dict(to_counted(unit, amount) for unit, amount in cost.items())
    known = set(units)
    for unit in found:
        if unit not in known:
            message = f"no node of the run counts {unit!r}: they count {', '.join(sorted(known))}"
            raise ConfigError(message + hint(unit, known), field="cost")
    if calls is not None:
        found.setdefault(CALLS, calls)
    return found
