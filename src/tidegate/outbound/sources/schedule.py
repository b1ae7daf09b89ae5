"""When a source is due next. Pure: instants in, instants out, in microseconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

from tidegate.core.bounds import SECOND
from tidegate.core.calendar import find_zone
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Interval(NamedTuple):
    """Due every so many microseconds, counted from when it was due last; what was missed is not made up for."""

    every: int

    def after(self, due: int, now: int) -> int:
        """Tell when it is due after having been due, at an instant not before that."""
        return due + ((now - due) // self.every + 1) * self.every

    def __str__(self) -> str:
        """Say it the short way."""
        return f"every {self.every / SECOND:g} s"


class Cron(NamedTuple):
    """Due when a cron expression says so, in a time zone."""

    expression: str
    timezone: str

    def after(self, due: int, now: int) -> int:
        """Tell the first instant after now."""
        del due
        local = (EPOCH + timedelta(microseconds=now)).astimezone(ZoneInfo(self.timezone))
        found: datetime = next(cron()(self.expression, local))
        return (found - EPOCH) // timedelta(microseconds=1)

    def __str__(self) -> str:
        """Say it as it was written."""
        return f"{self.expression} ({self.timezone})"


def read_cron(expression: str, timezone: str) -> Cron:
    """Check an expression and its time zone."""
    find_zone(timezone)
    error: type[Exception] = _cronsim().CronSimError
    try:
        found = Cron(expression, timezone)
        found.after(0, 0)
    except error as wrong:
        raise ConfigError(f"{wrong}: expected an expression such as '*/5 * * * *'", field="cron") from None
    except StopIteration:
        raise ConfigError("will never be due", field="cron") from None
    return found


def cron() -> Callable[..., Any]:
    """Give the reader of expressions."""
    return _cronsim().CronSim  # type: ignore[no-any-return]  # it has no types


def _cronsim() -> Any:  # noqa: ANN401 - a module
    try:
        import cronsim  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError("needs cronsim: pip install 'tidegate[sources]'", field="cron") from None
    return cronsim


Timetable = Interval | Cron
