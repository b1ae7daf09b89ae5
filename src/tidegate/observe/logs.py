"""Records as log lines: denials as warnings, checks as a sample, nothing raw that a client wrote.

    INFO     read: 203.0.113.9 allowed, 59 of 60 left: GET /api/feeds          every `every`-th check; 0: none
    WARNING  rate limit exceeded: read: 203.0.113.9, retry in 12 s: GET /api/feeds
    WARNING  rate limit exceeded: read: 290 more denials within one second

A flood of denials must not become a flood of lines: of each policy, the first `burst` denials of a second have a line
of their own. The others are counted, and one line tells how many they were, when the second is over and somebody calls:
the next denial, or whoever calls `flush` from time to time.
"""

from __future__ import annotations

import logging
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import SECOND, ceil_div
from tidegate.lock import Lock, locked
from tidegate.policy import join_key

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tidegate.observe.record import Record

MAX_LOGGED_LENGTH: Final = 200  # characters of what a client wrote that a line repeats
MAX_NAMES: Final = 1000  # kinds of lines that are counted apart: a program may make up any number of policies
BURST: Final = 10  # lines of a kind in a second
SHADOW: Final = " (shadow mode: allowed)"


class Unwritten(NamedTuple):
    """How many lines of a kind were not written, within one second."""

    name: Hashable
    lines: int


class LogThrottle:
    """Tells of lines whether they may be written: of each kind so many in a second. The others are counted."""

    def __init__(self, burst: int) -> None:
        """Let `burst` lines of a kind through in a second (0: none ever, and they are not counted)."""
        self._burst = burst
        self._seconds: dict[Hashable, tuple[int, int]] = {}  # by kind: when its second began, and lines since
        self._over = 0  # when the first of these seconds is over
        self._latest = 0  # the latest instant: a clock may step back
        self.lock = Lock()

    def may_write(self, name: Hashable, now: int) -> bool:
        """Tell whether a line of this kind may be written now; call `unwritten` before."""
        return self._count(name, now) <= self._burst if self._burst else False

    @locked
    def _count(self, name: Hashable, now: int) -> int:
        if name not in self._seconds and len(self._seconds) >= MAX_NAMES:
            name = None  # all further kinds together
        began, lines = self._seconds.get(name, (now, 0))
        self._over = min(self._over, began + SECOND) if self._seconds else began + SECOND
        self._latest = now
        self._seconds[name] = (began, lines + 1)
        return lines + 1

    def unwritten(self, now: int | None = None) -> list[Unwritten]:
        """Tell how many lines were not written in seconds that are over, of each kind; None: in all of them."""
        if not self._seconds or (now is not None and self._latest <= now < self._over):
            return []
        over = self._end_seconds(now)
        return [Unwritten(name, lines - self._burst) for name, lines in over if lines > self._burst]

    @locked
    def _end_seconds(self, now: int | None) -> list[tuple[Hashable, int]]:
        seconds = self._seconds
        over = [name for name, (began, _) in seconds.items() if now is None or not began <= now < began + SECOND]
        ended = [(name, seconds.pop(name)[1]) for name in over]
        self._over = min((began + SECOND for began, _ in seconds.values()), default=0)
        return ended


class DecisionLog:
    """An observer that writes log lines. Each decision is told once, so it can be several limiters' observer."""

    def __init__(self, logger: logging.Logger | str = "tidegate", *, every: int = 0, burst: int = BURST) -> None:
        """Log every so-many-th check as INFO (0: none).

        Log up to `burst` denials of a policy in a second as WARNING, and how many more there were (0: none of this).
        """
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._every = every
        self._checks = count(1)
        self._lines = LogThrottle(burst)

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
        decision = record.decision
        self.flush(decision.at)
        kind = (SHADOW if decision.allowed else "", record.policy.name)
        if not self._lines.may_write(kind, decision.at):
            return
        retry = decision.retry
        self._logger.warning(
            "rate limit exceeded%s: %s: %s, %s%s",
            *kind,
            shown_key(record),
            "never allowed" if retry < 0 else f"retry in {max(1, ceil_div(retry, SECOND))} s",
            _about(record),
        )

    def flush(self, now: int | None = None) -> None:
        """Log how many denials had no line of their own in seconds that are over; None: in all of them."""
        for name, lines in self._lines.unwritten(now):
            shadow, policy = name if isinstance(name, tuple) else ("", "other policies")
            self._logger.warning("rate limit exceeded%s: %s: %d more denials within one second", shadow, policy, lines)


def shown_key(record: Record) -> str:
    """Write a key for a log."""
    return shown(join_key(record.key))


def shown(text: str) -> str:
    """Write what a client wrote for a log: shortened, control characters and the like escaped."""
    short = text if len(text) <= MAX_LOGGED_LENGTH else text[:MAX_LOGGED_LENGTH] + "…"
    return short if short.isprintable() else short.encode("unicode_escape").decode("ascii")


def _about(record: Record) -> str:
    return f": {shown(record.subject)}" if record.subject else ""
