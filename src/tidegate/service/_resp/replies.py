"""Writes replies of the Redis protocol, RESP2 and RESP3, as strings: a connection encodes all its replies at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import SECOND, ceil_div
from tidegate.core._decision import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate._limiter.limiter import Usage
    from tidegate.service._api.problems import ProblemError

    Value = int | str | list["Value"] | None

OK: Final = "+OK\r\n"
MILLISECOND: Final = SECOND // 1000
MAX_ERROR_LENGTH: Final = 400  # characters of an error message
# The first word of an error, by the kind of problem: clients act on it. All other kinds are ERR.
ERROR_WORDS: Final = {
    "unauthorized": "NOAUTH",
    "forbidden": "NOPERM",
    **dict.fromkeys(("busy", "stopping", "store-unavailable", "bus-unavailable", "worker-unresponsive"), "TRYAGAIN"),
}


def write_value(value: Value, protocol: int = 2) -> str:
    """Write an integer, a string, a list of values, or None."""
    if isinstance(value, int):
        return f":{value}\r\n"
    if isinstance(value, str):
        return f"${len(value) if value.isascii() else len(value.encode())}\r\n{value}\r\n"
    if value is None:
        return "$-1\r\n" if protocol == 2 else "_\r\n"  # noqa: PLR2004 - RESP2
    return f"*{len(value)}\r\n" + "".join([write_value(each, protocol) for each in value])


def write_map(pairs: Mapping[str, Value], protocol: int) -> str:
    """Write a mapping: RESP2 has none, so there it is a list of names and values."""
    head = f"*{2 * len(pairs)}\r\n" if protocol == 2 else f"%{len(pairs)}\r\n"  # noqa: PLR2004 - RESP2
    return head + "".join([write_value(each, protocol) for pair in pairs.items() for each in pair])


def write_error(word: str, message: str) -> str:
    """Write an error: one line, without control characters."""
    line = "".join([each if each.isprintable() else "?" for each in message[:MAX_ERROR_LENGTH]])
    return f"-{word} {line}\r\n"


def write_problem(problem: ProblemError) -> str:
    """Write a problem as an error: its first word, its kind (unless the command is invalid) and the detail."""
    detail = str(problem) if problem.kind == "bad-request" else f"{problem.kind}: {problem}"
    return write_error(ERROR_WORDS.get(problem.kind, "ERR"), detail)


def write_decision(decision: Decision | None, more: Value | tuple[()] = (), protocol: int = 2, member: str = "") -> str:
    """Write a decision: allowed, remaining, retry after and reset after in ms, names of the limits that denied it.

    `more` is a further value at the end, such as the id of a reservation, and `member` that of a pool after it.
    """
    if decision.__class__ is Decision and decision[0] and more == () and len(decision[2]) == 1:
        _, at, limits, states, costs = decision  # by position: a fast path
        limit = limits[0]
        remaining, _, reset = states[0] if costs is None else limit.view(states[0], limit, costs[0], at)  # type: ignore[misc]  # as Decision.views
        left = remaining if remaining > 0 else 0  # noqa: FURB136 - max() would cost a tenth of this function
        return f"*5\r\n:1\r\n:{left}\r\n:0\r\n:{-(-reset // 1000)}\r\n*0\r\n"
    values = describe_decision(decision)
    if more != ():
        values.append(more)  # type: ignore[arg-type]  # a Value
    if member:
        values.append(member)
    return write_value(values, protocol)


def describe_decision(decision: Decision | None) -> list[Value]:
    """Return the five values of a decision. None means not limited."""
    if decision is None:
        return [1, 0, 0, 0, []]
    allowed = decision.allowed
    retry = 0 if allowed else decision.retry
    reset = max([view[2] for view in decision.views])
    return [int(allowed), decision.remaining, to_millis(retry), to_millis(reset), list(decision.violated)]


def to_millis(micros: int) -> int:
    """Convert to milliseconds, rounding up, so that the time has passed by then; NEVER stays -1."""
    return NEVER if micros == NEVER else ceil_div(micros, MILLISECOND)


def write_usage(usage: Mapping[str, Usage]) -> str:
    """Write the usage of a key: for each limit its name, quota, used, remaining, reset after in ms, and unit."""
    rows: list[Value] = []
    for name, (quota, used, remaining, reset_after, unit) in usage.items():
        rows.append([name, quota, used, remaining, to_millis(round(reset_after * SECOND)), unit])
    return write_value(rows)


__all__ = [
    "OK",
    "describe_decision",
    "to_millis",
    "write_decision",
    "write_error",
    "write_map",
    "write_problem",
    "write_usage",
    "write_value",
]
