"""Encodes a RateLimitResponse as protobuf.

The messages are small and most of their bytes are the same for every decision of a limit. Building them as message
objects first would take most of the time of a decision; tests parse the result with Envoy's definition.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tidegate.core.bounds import SECOND
from tidegate.headers import PROBLEM_TYPE, problem, write
from tidegate.service.decisions.descriptors import ENVOY_UNITS, UNIT_PERIODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core import Limit
    from tidegate.core.decision import Decision
    from tidegate.headers import Style

MAX_UINT32: Final = 2**32 - 1
UNIT_NUMBERS: Final = {
    period: number for number, name in enumerate(ENVOY_UNITS) if (period := UNIT_PERIODS.get(name)) is not None
}
# What comes before the value of a field: its number and its kind. The numbers are those of `envoy.messages`.
OVERALL_OK: Final = b"\x08\x01"
OVERALL_OVER_LIMIT: Final = b"\x08\x02"
STATUS_TAG: Final = b"\x12"
HEADER_TAG: Final = b"\x1a"
RAW_BODY: Final = b"\x2a"
STATUS_OK: Final = b"\x08\x01"
STATUS_OVER_LIMIT: Final = b"\x08\x02"
CURRENT_LIMIT: Final = b"\x12"
LIMIT_REMAINING: Final = b"\x18"
DURATION_UNTIL_RESET: Final = b"\x22"
NOT_LIMITED: Final = b"\x12\x02\x08\x01"  # a status with the code OK and nothing else


def encode_response(decisions: Sequence[Decision | None], style: Style) -> bytes:
    """Encode the response to a request; the decision of a descriptor that is not limited is None."""
    parts = [OVERALL_OK]
    worst: Decision | None = None
    worst_order: tuple[bool, int] = (False, 0)
    several = len(decisions) > 1
    for each in decisions:
        if each is None:
            parts.append(NOT_LIMITED)
            continue
        decision = each.with_views()
        over = is_over(decision)
        if over:
            parts[0] = OVERALL_OVER_LIMIT
        parts.append(_status(decision, over=over))
        order = (over, -decision.remaining) if several else worst_order
        if worst is None or order > worst_order:
            worst, worst_order = decision, order
    if worst is not None:
        denied = parts[0] is OVERALL_OVER_LIMIT
        for name, value in write(worst, style):
            if denied or name != "Retry-After":
                parts.append(_header(name, value))
        if denied:
            parts += (_header("content-type", PROBLEM_TYPE), _bytes(RAW_BODY, json.dumps(problem(worst)).encode()))
    return b"".join(parts)


def is_over(decision: Decision) -> bool:
    """Return whether this descriptor itself is over its limit: a denial of another descriptor denies it too."""
    return not decision.allowed and decision.retry != 0


def _status(decision: Decision, *, over: bool) -> bytes:
    """Describe the tightest limit of a descriptor."""
    limits, views = decision.policy_limits, decision.views
    tightest = 0
    if len(limits) > 1:
        tightest = min(range(len(views)), key=lambda index: (views[index][1] == 0, views[index][0]))
    remaining, _, reset = views[tightest]
    seconds, micros = divmod(reset, SECOND)
    status = STATUS_OVER_LIMIT if over else STATUS_OK
    status += _current_limit(limits[tightest])
    if remaining > 0:
        status += LIMIT_REMAINING + varint(min(MAX_UINT32, remaining))
    until = b""
    if seconds:
        until = b"\x08" + varint(seconds)
    if micros:
        until += b"\x10" + varint(micros * 1000)
    status += DURATION_UNTIL_RESET + varint(len(until)) + until
    return STATUS_TAG + varint(len(status)) + status


@lru_cache(maxsize=1024)
def _current_limit(limit: Limit) -> bytes:
    unit = UNIT_NUMBERS.get(str(limit.period), 0)  # 0 if Envoy has no such unit
    encoded = b"\x08" + varint(min(MAX_UINT32, limit.quota)) + (b"\x10" + varint(unit) if unit else b"")
    return _bytes(CURRENT_LIMIT, encoded + _bytes(b"\x1a", limit.name.encode()))


def _header(name: str, value: str) -> bytes:
    encoded = value.encode()
    field = _header_name(name) + varint(len(encoded)) + encoded
    return HEADER_TAG + varint(len(field)) + field


@lru_cache(maxsize=64)
def _header_name(name: str) -> bytes:
    return _bytes(b"\x0a", name.lower().encode()) + b"\x12"


def _bytes(tag: bytes, value: bytes) -> bytes:
    """Encode a field of bytes, a string or a message."""
    return tag + varint(len(value)) + value


def varint(number: int) -> bytes:
    """Encode an integer: seven bits in each byte, the lowest first."""
    if number < 0x80:  # noqa: PLR2004 - fits one byte
        return ONE_BYTE[number]
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - more than the seven bits of one byte
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


ONE_BYTE: Final = tuple(bytes((number,)) for number in range(0x80))
