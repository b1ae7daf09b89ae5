"""Conditions such as `denied_clients > 0.1%`, with which a report fails a check in CI."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONDITION = re.compile(r"\s*([a-z_]+)\s*(>=|<=|>|<)\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*(%?)\s*")
COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Figure(NamedTuple):
    """Where a report has a number, and what a percentage of it refers to."""

    section: str
    name: str
    total: str


REPLAY_FIGURES: Final = {
    "denied_requests": Figure("totals", "denied", "requests"),
    "denied_clients": Figure("totals", "denied_clients", "clients"),
}
DIFF_FIGURES: Final = {
    "denied_requests": Figure("new", "denied", "requests"),
    "denied_clients": Figure("new", "denied_clients", "clients"),
    "newly_denied_requests": Figure("newly_denied", "requests", "requests"),
    "newly_denied_clients": Figure("newly_denied", "clients", "clients"),
    "newly_denied_usd": Figure("newly_denied", "usd", ""),
    "newly_allowed_requests": Figure("newly_allowed", "requests", "requests"),
    "newly_allowed_clients": Figure("newly_allowed", "clients", "clients"),
}


class Condition(NamedTuple):
    """A condition that fails a check if it holds."""

    text: str
    name: str
    comparison: str
    value: float
    percent: bool

    @classmethod
    def parse(cls, text: str, figures: Mapping[str, Figure]) -> Condition:
        """Parse a condition; raises ConfigError."""
        match = CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(f"expected a condition such as 'denied_clients > 0.1%', not {text!r}", field="--fail-if")
        name, comparison, value, percent = match.groups()
        if name not in figures:
            expected = did_you_mean(name, figures) or f"expected one of {', '.join(figures)}"
            raise ConfigError(f"unknown number {name!r}: {expected}", field="--fail-if")
        if percent and not figures[name].total:
            raise ConfigError(f"{name} has no total, so it cannot be compared with a percentage", field="--fail-if")
        return cls(text.strip(), name, comparison, float(value.replace("_", "")), bool(percent))

    def holds(self, report: Mapping[str, Any], figures: Mapping[str, Figure]) -> bool:
        """Return whether it holds for a report."""
        section, name, total = figures[self.name]
        found = report[section][name]
        limit = self.value
        if self.percent:  # both sides times the total: a share of nothing is 0
            totals = report.get("totals") or report["new"]
            found, limit = found * 100, limit * totals[total]
        return COMPARISONS[self.comparison](found, limit)
