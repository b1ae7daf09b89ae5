"""When a source is due next. Pure functions of instants, in microseconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

from tidegate.core._calendar import find_zone
from tidegate.core._limit import period_text
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Interval(NamedTuple):
    """Due at a fixed interval (in microseconds) after the last due time; missed runs are skipped."""

    every: int

    def after(self, due: int, now: int) -> int:
        """Return the next due time after `due` that is later than `now`."""
        return due + ((now - due) // self.every + 1) * self.every

    def __str__(self) -> str:
        """Return a short description."""
        return f"every {period_text(self.every)}"


class Cron(NamedTuple):
    """Due at the times of a cron expression, in a time zone."""

    expression: str
    timezone: str

    def after(self, due: int, now: int) -> int:
        """Return the first due time after `now`."""
        del due
        local = (EPOCH + timedelta(microseconds=now)).astimezone(ZoneInfo(self.timezone))
        found: datetime = next(cron_parser()(self.expression, local))
        return (found - EPOCH) // timedelta(microseconds=1)

    def __str__(self) -> str:
        """Return the expression and its time zone."""
        return f"{self.expression} ({self.timezone})"


def read_cron(expression: str, timezone: str) -> Cron:
    """Validate an expression and its time zone."""
    find_zone(timezone)
    error: type[Exception] = _cronsim().CronSimError
    try:
        found = Cron(expression, timezone)
        found.after(0, 0)
    except error as wrong:
        raise ConfigError(
            f"{wrong}: expected a cron expression such as '*/5 * * * *', not {expression!r}", field="cron"
        ) from None
    except StopIteration:
        raise ConfigError(f"{expression!r} never matches a date and time", field="cron") from None
    return found


def cron_parser() -> Callable[..., Any]:
    """Return the parser of cron expressions."""
    return _cronsim().CronSim  # type: ignore[no-any-return]  # cronsim has no types


def _cronsim() -> Any:  # noqa: ANN401 - a module
    try:
        import cronsim  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError("needs cronsim: pip install 'tidegate[sources]'", field="cron") from None
    return cronsim


Schedule = Interval | Cron
