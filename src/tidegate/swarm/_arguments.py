"""Reads and checks the arguments of swarm limiters: windows, waits, the bus and the name of an agent."""

from __future__ import annotations

import math
import os
import secrets
import socket
from datetime import timedelta

from tidegate.bus import Bus
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError
from tidegate.headers import parse_retry_after

Window = float | timedelta | str


def is_nothing(window: Window) -> bool:
    """Return whether a window is zero or negative, in any of its forms."""
    if isinstance(window, timedelta):
        return window <= timedelta(0)
    if isinstance(window, str):
        return _is_zero_or_negative(window.strip())
    return isinstance(window, (int, float)) and not isinstance(window, bool) and window <= 0


def _is_zero_or_negative(text: str) -> bool:
    """Return whether a period such as "0s" or "-5m" is zero or negative; False if it is not a period."""
    length = text.removeprefix("-")
    is_zero = {character for character in length if character.isdecimal()} == {"0"}
    if length == text and not is_zero:
        return False
    try:
        parse_period(length.replace("0", "1") if is_zero else length)  # only to check the unit
    except ConfigError:
        return False
    return True


def read_retry_after(value: float | timedelta | str | None, now: float) -> float | None:
    """Return the seconds to wait from `now`: a number, a timedelta, or the string of a Retry-After field."""
    if value is None:
        return None
    wait: object = value
    if isinstance(value, timedelta):
        wait = value.total_seconds()
    elif isinstance(value, (str, bytes)):
        wait = parse_retry_after(value, now)
    if isinstance(wait, (int, float)) and not isinstance(wait, bool) and 0 <= wait < math.inf:
        return wait
    raise ConfigError(
        "must be a non-negative number of seconds, a timedelta, or a Retry-After field such as '12' or "
        f"'Fri, 04 Oct 2024 00:00:12 GMT', not {value!r}",
        field="retry_after",
    )


def check_swarm(bus: object, agent_id: object) -> None:
    """Refuse a swarm limiter without a bus, or with an invalid name."""
    if not isinstance(bus, (str, Bus)) or not bus:
        raise ConfigError(f"must be a Bus, such as open_bus('nats://127.0.0.1:4222'), not {bus!r}", field="bus")
    if agent_id is not None and (not isinstance(agent_id, str) or not agent_id):
        message = f"must be a unique non-empty string, or None for a name with host and process, not {agent_id!r}"
        raise ConfigError(message, field="agent_id")


def process_name() -> str:
    """Return a name that no other object has: the host, the process, and a random part."""
    return f"{socket.gethostname() or 'host'}-{os.getpid()}-{secrets.token_hex(4)}"
