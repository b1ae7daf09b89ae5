"""Metrics of money: how much of each ceiling is used, read from the store, so that all processes report the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._policy import join_key
from tidegate._policy.units import is_money
from tidegate.errors import StoreUnavailable
from tidegate.observe._text_format import MetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate._limiter.limiter import Usage
    from tidegate._policy import Key, Policy
    from tidegate.observe._text_format import MetricKind
    from tidegate.outbound._quota.gate import AsyncGate

MAX_MONEY_KEYS: Final = 200  # accounts, teams and tags with metrics of their own
MONEY_LABELS: Final = ("ceiling", "key", "limit", "unit")
MONEY_GAUGES: Final = ("tidegate_money_spent_micros", "tidegate_money_ceiling_micros", "tidegate_money_debt_micros")
WARNINGS: Final = "tidegate_money_warnings_total"
# name: kind, help, labels
MONEY_METRICS: Final[dict[str, tuple[MetricKind, str, tuple[str, ...]]]] = {
    MONEY_GAUGES[0]: ("gauge", "Money spent or reserved in the current window of a limit.", MONEY_LABELS),
    MONEY_GAUGES[1]: ("gauge", "The most that may be spent in a window of a limit.", MONEY_LABELS),
    MONEY_GAUGES[2]: ("gauge", "By how much calls exceeded a limit in the current window.", MONEY_LABELS),
    WARNINGS: ("counter", "Warnings that a money limit has reached a milestone, by its percentage.", ("milestone",)),
}


async def read_money_metrics(gate: AsyncGate) -> list[MetricFamily]:
    """Return how much of each money limit is used, of the accounts, teams and tags that had calls, and warnings."""
    samples: dict[str, list[Any]] = {name: [] for name in MONEY_METRICS}
    for limiter, key in list(find_ceilings(gate))[:MAX_MONEY_KEYS]:
        try:
            usage = await limiter.usage(key)
        except StoreUnavailable:
            continue
        for labels, used in money_usage(limiter.policy, key, usage):
            values = used.used, used.quota, max(0, used.used - used.quota)
            for name, value in zip(MONEY_GAUGES, values, strict=True):
                samples[name].append((name, labels, value))
    if gate.spending is not None:
        warned = gate.spending.warnings.totals().items()
        samples[WARNINGS] = [(WARNINGS, {"milestone": percent}, count) for percent, count in warned]
    return [MetricFamily(name, kind, text, samples[name]) for name, (kind, text, _) in MONEY_METRICS.items()]


def find_ceilings(gate: AsyncGate) -> Iterator[tuple[Any, Key]]:
    """Yield the limiters and keys of money limits: ceilings of all calls first, then of teams, then accounts."""
    shared = {ceiling.policy.name: ceiling for provider in gate.providers for ceiling in provider.ceilings}
    for ceiling in sorted(shared.values(), key=lambda each: len(each.per)):
        limiter = gate.planner.open_ceiling(ceiling)
        for key in ["all"] if not ceiling.per else gate.planner.ceiling_keys(ceiling):
            yield limiter, key
    for account in gate.accounts:
        if any(is_money(unit) for unit in account.units):
            yield account.limiter, account.key


def money_usage(policy: Policy, key: Key, usage: dict[str, Usage]) -> Iterator[tuple[dict[str, str], Usage]]:
    """Yield the labels and the usage of the money limits of a policy."""
    name = policy.name.removeprefix("spend:").removeprefix("provider:")
    for limit in policy.limits:
        if is_money(limit.unit) and limit.name in usage:
            labels = dict(zip(MONEY_LABELS, (name, join_key(key), limit.name, limit.unit), strict=True))
            yield labels, usage[limit.name]
