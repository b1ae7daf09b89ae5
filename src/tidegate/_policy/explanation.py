"""An explanation of a request or call: the rules it was compared with, its key, its limits, and what a denial says."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate._policy.key import Key
    from tidegate._policy.model import Cost, Policy
    from tidegate.core._limit import Limit

NAME_OPTION = re.compile(r' name=(?:"(?:[^"\\]|\\.)*"|\S+)')  # of a limit; the name has a column of its own


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


@dataclass(frozen=True)
class ExplainedDenial:
    """A denial: when it happens, what it says in lines, and the same as `details`: status, retry_after and so on."""

    when: str
    says: list[str]
    details: dict[str, object]


@dataclass
class Explanation:
    """What limits a request or call, and why. `tidegate explain` prints it."""

    request: str
    kind: str
    key: str | None = None
    key_reason: str = ""
    rules: list[RuleVerdict] = field(default_factory=list)
    limits: list[ApplicableLimit] = field(default_factory=list)
    verdict: str = ""  # in one sentence, why these limits apply, or why none does
    denial: ExplainedDenial | None = None
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

    def describe(self) -> dict[str, object]:
        """Describe it for JSON."""
        denial = self.denial and {"when": self.denial.when, **self.denial.details, "says": self.denial.says}
        return {**asdict(self), "denial": denial, "limited": bool(self.limits)}


def show_key(key: Key) -> str:
    """Write a key; its parts are separated by spaces."""
    return key if isinstance(key, str) else " ".join(key)


def after_burst(count: int, singular: str) -> str:
    """Return the words for the moment after as many requests as a limit allows at once."""
    return f"after {count:,} such {singular}{'' if count == 1 else 's'} at once"


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
