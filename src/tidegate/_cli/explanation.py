"""An explanation of a request: the rules it was compared with, its key, its limits, and what a denial says."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.tables import TableColumn, TextTable
from tidegate._policy.durations import format_duration
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate._cli.output import Output
    from tidegate._policy import Cost, Key, Policy
    from tidegate.core._limit import Limit

MINUTE: Final = 60
NAME_OPTION = re.compile(r' name=(?:"(?:[^"\\]|\\.)*"|\S+)')  # of a limit; the name has a column of its own
RULE_COLUMNS: Final = (
    TableColumn("rule"),
    TableColumn("what it matches", shrinks=True),
    TableColumn("this request", shrinks=True),
)
LIMIT_COLUMNS: Final = (
    TableColumn("", right=True),
    TableColumn("limit", shrinks=True),
    TableColumn("of"),
    TableColumn("allows", shrinks=True),
    TableColumn("at once", right=True),
    TableColumn("then one every", right=True),
    TableColumn("mode", optional=True),
)


@dataclass(frozen=True)
class RuleVerdict:
    """A rule, what it matches, and whether the request matches it; if not, why not."""

    rule: str
    pattern: str
    matches: bool
    reason: str = ""


@dataclass(frozen=True)
class ApplicableLimit:
    """A limit that applies: how many such requests it allows at once, and at what pace afterwards.

    `seconds_each` is the average time per request. A limit that refills continuously then allows one request every
    `one_every` seconds. Logs and windows do not: their permits return when earlier requests leave the period.
    """

    name: str
    owner: str
    text: str
    unit: str
    cost: int
    at_once: int
    seconds_each: float
    one_every: float | None
    mode: str = "enforce"

    @property
    def strictness(self) -> tuple[bool, int, float]:
        """Sorts the strictest limit first: it denies the earliest in a burst, and of two, the slower one."""
        return self.mode == "shadow", self.at_once, -self.seconds_each


@dataclass
class Explanation:
    """What is written about a request."""

    request: str
    kind: str
    key: str | None = None
    key_reason: str = ""
    rules: list[RuleVerdict] = field(default_factory=list)
    limits: list[ApplicableLimit] = field(default_factory=list)
    verdict: str = ""  # in one sentence, why these limits apply, or why none does
    denial: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def add_policy(self, owner: str, policy: Policy, cost: Cost) -> None:
        """Add the limits of a policy that charge this request."""
        self.limits += applicable_limits(owner, policy.limits, policy.costs(cost), policy.mode)

    def sort(self) -> None:
        """Sort the limits, the strictest first."""
        self.limits.sort(key=lambda limit: limit.strictness)

    @property
    def strictest(self) -> ApplicableLimit | None:
        """The limit that denies first; None if nothing denies."""
        return next(
            (limit for limit in sorted(self.limits, key=lambda each: each.strictness) if limit.mode != "shadow"), None
        )

    def describe(self) -> dict[str, Any]:
        """Describe it for JSON."""
        return {**asdict(self), "limited": bool(self.limits)}

    def write(self, output: Output) -> None:
        """Write it as text."""
        output.write_line(self.request, "bold")
        if self.verdict:
            output.write_line(self.verdict)
        if self.key is not None:
            output.write_line(f"key: {output.clean(self.key)}{f' ({self.key_reason})' if self.key_reason else ''}")
        if self.rules:
            output.write_line()
            rows = [
                (each.rule, each.pattern, "matches" if each.matches else f"no: {each.reason}") for each in self.rules
            ]
            styles = ["green" if each.matches else "dim" for each in self.rules]
            output.write_table(TextTable(RULE_COLUMNS, list(rows), styles))
        if self.limits:
            output.write_line()
            output.write_line("limits, the strictest first:", "bold")
            output.write_table(
                TextTable(LIMIT_COLUMNS, [limit_row(i, each) for i, each in enumerate(self.limits, start=1)])
            )
        self._write_denial(output)
        for note in self.notes:
            output.write_line()
            output.write_line(note)

    def _write_denial(self, output: Output) -> None:
        if self.denial is None:
            return
        output.write_line()
        output.write_line(self.denial["when"], "bold")
        for line in self.denial["says"]:
            output.write_line(f"  {line}")


def show_key(key: Key) -> str:
    """Write a key; its parts are separated by spaces."""
    return key if isinstance(key, str) else " ".join(key)


def limit_row(number: int, limit: ApplicableLimit) -> tuple[str, ...]:
    """Return the cells of a limit."""
    pace = "" if limit.one_every is None else format_pace(limit.one_every)
    if limit.unit == "concurrent-requests":
        pace = "a free slot"
    return str(number), limit.name, limit.owner, limit.text, f"{limit.at_once:,}", pace, limit.mode


def format_pace(seconds: float) -> str:
    """Write the time between two requests, below a minute in three digits: 1.8s is not 2s."""
    return f"{seconds:.3g}s" if 1 <= seconds < MINUTE else format_duration(seconds)


def applicable_limits(owner: str, limits: Iterable[Limit], costs: Iterable[int], mode: str) -> list[ApplicableLimit]:
    """Return the limits that charge a request anything."""
    found = []
    for limit, cost in zip(limits, costs, strict=True):
        if cost or not limit.quota:
            pace = Fraction(limit.length * max(1, cost), max(1, limit.quota) * SECOND)
            at_once = limit.burst // cost if limit.quota else 0
            text = NAME_OPTION.sub("", str(limit))
            one_every = float(pace) if limit.rules.refills else None
            found.append(
                ApplicableLimit(limit.name, owner, text, limit.unit, cost, at_once, float(pace), one_every, mode)
            )
    return found
