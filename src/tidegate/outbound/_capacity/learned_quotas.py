"""Learns quotas that are lower than the provider file says, from responses that report them. Time is an argument.

    x-ratelimit-limit-tokens: 30000, x-ratelimit-reset-tokens: 59.8s       a file that says 90,000 per minute

A reported quota is used instead of the configured one if it is lower, and if its period is that of the limit: the
response says so, or its reset is a whole period away. So a response that reports ten permits per second, without a
period, does not lower `60/1m` to ten. A quota that differs from the one reported before (a path with its own limit) is
used only after the same one was reported for a whole period; until then, the configured one is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tidegate.core._bounds import SECOND
from tidegate.outbound._capacity.learning import SAME_WINDOW_RATIO, match_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core import Limit
    from tidegate.headers import Advice, LimitAdvice

NOT_LEARNED = 0


class QuotaReport(NamedTuple):
    """The last quota that was reported for a limit, and until when it is not used; 0: it is used."""

    quota: int
    unsteady_until: int


class LearnedQuotas:
    """The quotas that a provider reported for the limits of an account, which are those of its file."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        """Start with what is configured."""
        self._limits = tuple(limits)
        self._reports: dict[int, QuotaReport] = {}
        self.quotas: tuple[int, ...] = (NOT_LEARNED,) * len(self._limits)  # that are used instead, by limit

    def report(self, advice: Advice, now: int) -> bool:
        """Read what a response reports at this instant; returns whether `quotas` changed."""
        for reported in advice.limits:
            index = match_limit(self._limits, reported) if reported.quota else None
            if index is not None and reported.quota is not None:
                self._note(index, reported, reported.quota, now)
        return self._update(now)

    def _note(self, index: int, reported: LimitAdvice, quota: int, now: int) -> None:
        length, last = self._limits[index].length, self._reports.get(index)
        if last is None:
            if has_period(reported, length):
                self._reports[index] = QuotaReport(quota, 0)
        elif last.quota != quota:
            self._reports[index] = QuotaReport(quota, now + length)

    def receive(self, quotas: Sequence[int]) -> bool:
        """Use what another process learned, where nothing was reported to this one; returns whether it changes any."""
        for index, quota in enumerate(quotas[: len(self._limits)]):
            if quota and index not in self._reports:
                self._reports[index] = QuotaReport(quota, 0)
        return self._update(0)

    def _update(self, now: int) -> bool:
        before = self.quotas
        self.quotas = tuple(self._quota(index, limit, now) for index, limit in enumerate(self._limits))
        return self.quotas != before

    def _quota(self, index: int, limit: Limit, now: int) -> int:
        found = self._reports.get(index)
        if found is None or found.quota >= limit.quota or now < found.unsteady_until:
            return NOT_LEARNED
        return found.quota

    def apply(self, limits: Sequence[Limit], minimum: Sequence[int]) -> tuple[Limit, ...]:
        """Return the limits with the learned quotas, each of at least `minimum`."""
        return tuple(
            with_quota(limit, max(quota, least)) if quota else limit
            for limit, quota, least in zip(limits, self.quotas, minimum, strict=True)
        )


def has_period(reported: LimitAdvice, length: int) -> bool:
    """Return whether a reported limit has at least this period, in microseconds; a stated one was compared before."""
    if reported.window is not None:
        return True
    return reported.reset_after is not None and reported.reset_after * SECOND * SAME_WINDOW_RATIO >= length


def with_quota(limit: Limit, quota: int) -> Limit:
    """Return a limit with a lower quota, and a burst that is not larger."""
    return replace(limit, quota=quota, burst=0 if limit.burst == limit.quota else min(limit.burst, quota))
