"""Spending: records what calls cost in a ledger, and warns when spending approaches a money limit."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConfigError
from tidegate.fork import fork_safe
from tidegate.spending.ledger import Ledger
from tidegate.spending.milestones import FULL_PERCENT, Milestones
from tidegate.spending.report import format_amount
from tidegate.spending.webhook import Webhook

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from tidegate.core import Decision

log: logging.Logger = logging.getLogger("tidegate.spending")

DEFAULT_MILESTONES: Final = (50, 80, 100)


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
        self.ledger: Ledger | None = ledger if opened else Ledger(ledger, timezone, self._clock)  # type: ignore[assignment, arg-type]  # one of the two
        self.webhook: Webhook | None = Webhook(webhook, secret) if webhook else None
        # By whether the windows of the limits are fixed or rolling.
        self._milestones = {fixed: Milestones(milestones, fixed=fixed) for fixed in (True, False)}
        self._highest = max(milestones, default=FULL_PERCENT)
        self._lock = fork_safe(threading.Lock())
        self.counts: Counter[str] = Counter()

    def record(
        self,
        source: str,
        unit: str,
        amount: int,
        overrun: int = 0,
        *,
        member: str = "",
        model: str = "",
        team: str = "",
        tag: str = "",
    ) -> None:
        """Record what a call of a provider, the `source`, has cost."""
        self.counts["spent_micros"] += amount
        if self.ledger is not None:
            self.ledger.add(source, unit, amount, overrun=overrun, member=member, model=model, team=team, tag=tag)

    def observe(self, name: str, decision: Decision) -> None:
        """Warn if a decision shows that money limits have reached a milestone; `name` is what they belong to.

        If such a limit denies the call, 100 % are reported: less is left than the call costs.
        """
        usages: dict[bool, dict[str, CeilingUsage]] = {True: {}, False: {}}  # by whether windows are fixed
        views = decision.views
        for limit, used, view in zip(decision.policy_limits, decision.used, views, strict=False):
            if limit.unit.endswith("_micros"):
                spent = limit.quota if not decision.within_limits and view[1] else used
                ceiling = name if limit.name in name else f"{name} {limit.name}"
                usage = CeilingUsage(max(used, spent), limit.quota, view[2] / 1e6, limit.unit)
                usages[limit.rules.windowed][ceiling] = usage
        at = datetime.fromtimestamp(decision.at / 1e6, UTC)
        for fixed, found in usages.items():
            if found:
                with self._lock:
                    reached = self._milestones[fixed].update(found, at)
                for ceiling, percent in reached:
                    self._warn(ceiling, percent, found[ceiling])

    def _warn(self, ceiling: str, percent: int, usage: CeilingUsage) -> None:
        self.counts[f"warned_{percent}"] += 1
        level = logging.WARNING if percent >= self._highest else logging.INFO
        used, quota = format_amount(usage.used, usage.unit), format_amount(usage.quota, usage.unit)
        log.log(level, "%d %% of %s is used or reserved: %s of %s", percent, ceiling, used, quota)
        if self.webhook is not None:
            fields: dict[str, Any] = {"event": "milestone", "ceiling": ceiling, "milestone": percent}
            self.webhook.send({**fields, **usage._asdict(), "debt": usage.debt})

    def close(self) -> None:
        """Write the ledger, and post warnings that are queued."""
        if self.ledger is not None:
            self.ledger.close()
        if self.webhook is not None:
            self.webhook.close()
