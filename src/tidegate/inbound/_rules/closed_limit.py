"""Limits of 0, which deny every request: allowed only for routes and in the inbound configuration.

A closed limit needs no arithmetic of its own: to every store it is a limit whose maximum is below any cost, so a
request never fits, nothing is charged, and the denial has no Retry-After.
"""

from __future__ import annotations

import re
from datetime import timedelta

from tidegate.core import Limit
from tidegate.errors import ConfigError

ZERO_QUOTA = re.compile(r"\s*0[0_]*(?=[^\d_])")  # the quota of a string such as `0/1m`


class ClosedLimit(Limit):
    """A limit with a quota of 0. It counts nothing, so its algorithm is always sliding_log."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the other arguments as those of a limit of 1."""
        if self.burst:
            raise ConfigError("cannot be combined with a limit of 0", field="burst")
        self._set(quota=1, algorithm="sliding_log")
        Limit.__post_init__(self)
        self._set(quota=0, burst=0)


def parse_inbound_limit(text: str) -> Limit:
    """Parse a limit such as `60/1m`; `0/1m` is a closed limit."""
    if not isinstance(text, str) or ZERO_QUOTA.match(text) is None:
        return Limit.parse(text)
    return close(Limit.parse(ZERO_QUOTA.sub("1", text, count=1)))


def close(limit: Limit) -> ClosedLimit:
    """Return a limit of 0 with the period, unit and name of a limit of 1."""
    if limit.burst != limit.quota:
        raise ConfigError("cannot be combined with a limit of 0", field="burst")
    return ClosedLimit(0, timedelta(microseconds=limit.length), unit=limit.unit, name=limit.name)


def is_closed(limits: tuple[Limit, ...]) -> bool:
    """Return whether one of the limits is 0."""
    return any(not limit.quota for limit in limits)
