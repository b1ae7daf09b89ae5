"""Records as log lines: each denial as a warning, checks as a sample, nothing raw that a client wrote.

    INFO     read: 203.0.113.9 allowed, 59 of 60 left: GET /api/feeds          every `every`-th check; 0: none
    WARNING  rate limit exceeded: read: 203.0.113.9, retry in 12 s: GET /api/feeds

A flood of denials must not become a flood of lines: beyond `burst` lines at once and as many a second, denials are only
counted, and the next line says how many there were.
"""

from __future__ import annotations

import logging
from itertools import count
from typing import TYPE_CHECKING, Final

from tidegate.core import Limit
from tidegate.core.bounds import SECOND, ceil_div
from tidegate.policy import join_key

if TYPE_CHECKING:
    from tidegate.core.algorithms import State
    from tidegate.observe.record import Record

LONGEST: Final = 200  # characters of what a client wrote that a line repeats


class Sparing:
    """Says of lines whether they may be written: so many at once and as many a second; the others are counted."""

    def __init__(self, burst: int) -> None:
        """Let `burst` lines through at once (0: none ever)."""
        self._limit = Limit(burst, "1s") if burst else None
        self._state: State | None = None
        self._unsaid = 0

    def line(self, now: int) -> str | None:
        """Give what to add to a line, about those that were not written before it; None: do not write it."""
        state = self._limit.charge(self._state, self._limit, 1, now) if self._limit is not None else None
        if state is None:
            self._unsaid += 1
            return None
        self._state = state
        unsaid, self._unsaid = self._unsaid, 0
        return f" ({unsaid} more were not logged)" if unsaid else ""


class DecisionLog:
    """An observer that writes log lines. Each decision is told once, so it can be several limiters' observer."""

    def __init__(self, logger: logging.Logger | str = "tidegate", *, every: int = 0, burst: int = 100) -> None:
        """Log every so-many-th check as INFO (0: none), and up to `burst` denials a second as WARNING (0: none)."""
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._every = every
        self._checks = count(1)
        self._lines = Sparing(burst)

    def __call__(self, record: Record) -> None:
        """Write a line, or none."""
        if record.verb in ("acquire", "hold"):
            if record.decision[0]:
                self.checked(record)
            else:
                self.exceeded(record)

    def checked(self, record: Record) -> None:
        """Log a sample of what was allowed."""
        if not self._every or next(self._checks) % self._every or not self._logger.isEnabledFor(logging.INFO):
            return
        said = min(record.decision.limits, key=lambda limit: limit.remaining)
        self._logger.info(
            "%s: %s allowed, %d of %d left%s",
            record.policy.name,
            shown_key(record),
            said.remaining,
            said.quota,
            _about(record),
        )

    def exceeded(self, record: Record) -> None:
        """Log a denial, if there were not too many this second."""
        if not self._logger.isEnabledFor(logging.WARNING):
            return
        more = self._lines.line(record.decision.at)
        if more is None:
            return
        retry = record.decision.retry
        self._logger.warning(
            "rate limit exceeded%s: %s: %s, %s%s%s",
            " (shadow: allowed all the same)" if record.decision.allowed else "",
            record.policy.name,
            shown_key(record),
            "never allowed" if retry < 0 else f"retry in {max(1, ceil_div(retry, SECOND))} s",
            _about(record),
            more,
        )


def shown_key(record: Record) -> str:
    """Write a key for a log."""
    return shown(join_key(record.key))


def shown(text: str) -> str:
    """Write what a client wrote for a log: shortened, control characters and the like escaped."""
    short = text if len(text) <= LONGEST else text[:LONGEST] + "…"
    return short if short.isprintable() else short.encode("unicode_escape").decode("ascii")


def _about(record: Record) -> str:
    return f": {shown(record.subject)}" if record.subject else ""
