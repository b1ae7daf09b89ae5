"""Spending: records what calls cost in a ledger, and warns when spending approaches a money limit."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._policy.setting_values import FULL_PERCENT
from tidegate._policy.units import is_money
from tidegate._runtime.clock import Clock, SystemClock
from tidegate._runtime.fork import fork_safe
from tidegate.core._decision import LocalDecision
from tidegate.errors import ConfigError
from tidegate.observe._counters import Counters, LabelledCounts, RowKind
from tidegate.spending._ledger import Ledger
from tidegate.spending._milestones import Milestones
from tidegate.spending._report import format_amount
from tidegate.spending._webhook import Webhook

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from tidegate.core import Decision

log: logging.Logger = logging.getLogger("tidegate.spending")

DEFAULT_MILESTONES: Final = (50, 80, 100)
WARNED: Final = RowKind("money warnings")  # by percentage


class CeilingUsage(NamedTuple):
    """How much of a money limit is used, in micros; `reset_after` is in seconds."""

    used: int
    quota: int
    reset_after: float
    unit: str

    @property
    def debt(self) -> int:
        """By how much the ceiling was passed."""
        return max(0, self.used - self.quota)


class Spending:
    """Records what calls cost, and warns at milestones of money limits: by log, metric and webhook. Thread-safe."""

    def __init__(
        self,
        ledger: str | os.PathLike[str] | Ledger | None = None,
        *,
        timezone: str = "UTC",
        milestones: Sequence[int] = DEFAULT_MILESTONES,
        webhook: str | None = None,
        secret: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Record in a `ledger`, a file whose days are those of `timezone`; None: only warn.

        Warnings of the `milestones`, percentages of a ceiling, are logged and posted to the URL of a `webhook`, signed
        with a `secret`.
        """
        if not all(isinstance(each, int) and 0 < each <= FULL_PERCENT for each in milestones):
            raise ConfigError(f"expected percentages from 1 to 100, not {tuple(milestones)}", field="milestones")
        self._clock: Clock = clock or SystemClock()
        opened = ledger is None or isinstance(ledger, Ledger)
        self.ledger: Ledger | None = ledger if opened else Ledger(ledger, timezone=timezone, clock=self._clock)  # type: ignore[assignment, arg-type]  # one of the two
        self.webhook: Webhook | None = Webhook(webhook, secret) if webhook else None
        # By whether the windows of the limits are fixed or rolling.
        self._milestones = {fixed: Milestones(milestones, fixed=fixed) for fixed in (True, False)}
        self._lock = fork_safe(threading.Lock())
        self._spent = 0
        self.warnings: LabelledCounts = LabelledCounts(Counters(), WARNED)
        for percent in milestones:
            self.warnings.add(str(percent), amount=0)

    def record(
        self,
        source: str,
        unit: str,
        amount: int,
        *,
        overrun: int = 0,
        member: str = "",
        model: str = "",
        team: str = "",
        tag: str = "",
    ) -> None:
        """Record what a call of a provider, the `source`, has cost."""
        with self._lock:
            self._spent += amount
        if self.ledger is not None:
            self.ledger.add(source, unit, amount, overrun=overrun, member=member, model=model, team=team, tag=tag)

    def observe(self, name: str, decision: Decision) -> None:
        """Warn if a decision shows that money limits have reached a milestone; `name` is what they belong to.

        If such a limit denies the call, the highest milestone is reported too: less is left than the call may cost.
        """
        if isinstance(decision, LocalDecision):  # made without the store, so what is used is unknown
            return
        at = datetime.fromtimestamp(decision.at / 1e6, UTC)
        for limit, used, view in zip(decision.policy_limits, decision.used, decision.views, strict=False):
            if not is_money(limit.unit):
                continue
            ceiling = name if limit.name in name else f"{name} {limit.name}"
            usage = CeilingUsage(used, limit.quota, view[2] / 1e6, limit.unit)
            milestones = self._milestones[limit.rules.windowed]
            with self._lock:
                reached = milestones.update({ceiling: usage}, at)
                denied = not decision.within_limits and view[1] and milestones.is_denial_new(ceiling, usage, at)
            for _, percent in reached:
                self._warn(ceiling, percent, usage)
            if denied:
                self._warn(ceiling, milestones.percents[-1], usage, denied=True)

    def _warn(self, ceiling: str, percent: int, usage: CeilingUsage, *, denied: bool = False) -> None:
        self.warnings.add(str(percent))
        message = "%d %% of %s is used or reserved: %s of %s"
        if denied:
            message = "%d %% of %s counts as reached, because it denied a call: %s of %s is used or reserved"
        log.warning(message, percent, ceiling, *(format_amount(each, usage.unit) for each in (usage.used, usage.quota)))
        if self.webhook is not None:
            fields: dict[str, Any] = {"event": "milestone", "ceiling": ceiling, "milestone": percent, "denied": denied}
            self.webhook.send({**fields, **usage._asdict(), "debt": usage.debt})

    @property
    def counts(self) -> dict[str, int]:
        """What was spent in this process, and how often each milestone was reported."""
        warned = {f"warned_{percent}": count for percent, count in self.warnings.own().items() if count}
        return {"spent_micros": self._spent, **warned}

    def close(self) -> None:
        """Write the ledger, and post warnings that are queued."""
        if self.ledger is not None:
            self.ledger.close()
        if self.webhook is not None:
            self.webhook.close()
