"""DecisionLog: writes denials as warnings and a sample of allowed calls; values from clients are escaped.

    INFO     read: 203.0.113.9 allowed, 59 of 60 left: GET /api/feeds          every `every`-th allowed call; 0: none
    WARNING  rate limit exceeded: read: 203.0.113.9, retry in 12 s: GET /api/feeds
    WARNING  rate limit exceeded: read: 290 more denials within one second
    WARNING  denied without the store: read: 203.0.113.9, retry in 1 s: GET /api/feeds

Many denials must not flood the log: for each policy, the first `burst` denials of a second have their own lines. The
others are counted, and one line reports their number after the second, at the next denial or the next call of `flush`.
"""

from __future__ import annotations

import logging
import threading
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._policy.key import show_key
from tidegate._runtime.fork import fork_safe
from tidegate._runtime.lock import locked
from tidegate.core._bounds import SECOND, ceil_div
from tidegate.core._decision import VERBS, denied_without_store

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tidegate.observe._record import Record

__all__ = ["DecisionLog"]

MAX_LOGGED_LENGTH: Final = 200  # characters of a value from a client in a line
MAX_NAMES: Final = 1000  # kinds of lines that are counted separately: a program may create any number of policies
DEFAULT_LOG_BURST: Final = 10  # lines of a kind in a second
EXCEEDED: Final = "rate limit exceeded"
WITHOUT_STORE: Final = "denied without the store"
SHADOW_SUFFIX: Final = " (shadow mode: allowed)"


class SuppressedLines(NamedTuple):
    """The number of suppressed lines of a kind within one second."""

    name: Hashable
    lines: int


class LogThrottle:
    """Limits log lines of each kind per second, and counts the suppressed ones."""

    def __init__(self, burst: int) -> None:
        """Allow `burst` lines of a kind per second (0: none, and they are not counted)."""
        self._burst = burst
        self._seconds: dict[Hashable, tuple[int, int]] = {}  # by kind: start of its second, and lines since
        self._over = 0  # when the first of these seconds ends
        self._latest = 0  # the latest instant: the clock may step back
        self.lock: threading.Lock = fork_safe(threading.Lock())

    def may_write(self, name: Hashable, now: int) -> bool:
        """Return whether a line of this kind may be written now; call `unwritten` before."""
        return self._count(name, now) <= self._burst if self._burst else False

    @locked
    def _count(self, name: Hashable, now: int) -> int:
        if name not in self._seconds and len(self._seconds) >= MAX_NAMES:
            name = None  # all other kinds together
        began, lines = self._seconds.get(name, (now, 0))
        self._over = min(self._over, began + SECOND) if self._seconds else began + SECOND
        self._latest = now
        self._seconds[name] = (began, lines + 1)
        return lines + 1

    def unwritten(self, now: int | None = None) -> list[SuppressedLines]:
        """Return and reset the suppressed lines of each kind in ended seconds; None: in all seconds."""
        if not self._seconds or (now is not None and self._latest <= now < self._over):
            return []
        over = self._end_seconds(now)
        return [SuppressedLines(name, lines - self._burst) for name, lines in over if lines > self._burst]

    @locked
    def _end_seconds(self, now: int | None) -> list[tuple[Hashable, int]]:
        seconds = self._seconds
        over = [name for name, (began, _) in seconds.items() if now is None or not began <= now < began + SECOND]
        ended = [(name, seconds.pop(name)[1]) for name in over]
        self._over = min((began + SECOND for began, _ in seconds.values()), default=0)
        return ended


class DecisionLog:
    """An observer that writes log lines. Several limiters may share it."""

    def __init__(
        self, logger: logging.Logger | str = "tidegate", *, every: int = 0, burst: int = DEFAULT_LOG_BURST
    ) -> None:
        """Log every `every`-th allowed call as INFO (0: none).

        Log up to `burst` denials of a policy per second as WARNING, and the number of further ones (0: neither).
        """
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._every = every
        self._checks = count(1)
        self._throttle = LogThrottle(burst)

    def __call__(self, record: Record) -> None:
        """Log a decision, unless it is suppressed."""
        if VERBS[record.verb].charges:
            if record.decision.within_limits:
                self.log_allowed(record)
            else:
                self.log_denied(record)

    def log_allowed(self, record: Record) -> None:
        """Log a sample of the allowed calls."""
        if not self._every or next(self._checks) % self._every or not self._logger.isEnabledFor(logging.INFO):
            return
        limit = min(record.decision.limits, key=lambda each: each.remaining)
        self._logger.info(
            "%s: %s allowed, %d of %d left%s",
            record.policy.name,
            shown_key(record),
            limit.remaining,
            limit.quota,
            _about(record),
        )

    def log_denied(self, record: Record) -> None:
        """Log a denial, unless there were too many this second."""
        if not self._logger.isEnabledFor(logging.WARNING):
            return
        decision = record.decision
        self.flush(decision.at)
        lost = denied_without_store(decision, record.policy.limits)
        cause = f"{WITHOUT_STORE if lost else EXCEEDED}{SHADOW_SUFFIX if decision.allowed else ''}"
        kind = (cause, record.policy.name)
        if not self._throttle.may_write(kind, decision.at):
            return
        retry = decision.retry
        self._logger.warning(
            "%s: %s: %s, %s%s",
            *kind,
            shown_key(record),
            "never allowed" if retry < 0 else f"retry in {max(1, ceil_div(retry, SECOND))} s",
            _about(record),
        )

    def flush(self, now: int | None = None) -> None:
        """Log the number of suppressed denials of ended seconds; None: of all seconds."""
        for name, lines in self._throttle.unwritten(now):
            cause, policy = name if isinstance(name, tuple) else (EXCEEDED, "other policies")
            self._logger.warning("%s: %s: %d more denials within one second", cause, policy, lines)


def shown_key(record: Record) -> str:
    """Return the key of a record for a log line."""
    return shown(show_key(record.key))


def shown(text: str) -> str:
    """Return a value from a client for a log line: shortened, with control characters escaped."""
    short = text if len(text) <= MAX_LOGGED_LENGTH else text[:MAX_LOGGED_LENGTH] + "…"
    return short if short.isprintable() else short.encode("unicode_escape").decode("ascii")


def _about(record: Record) -> str:
    return f": {shown(record.subject)}" if record.subject else ""
