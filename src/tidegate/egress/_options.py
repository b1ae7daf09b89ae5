"""The options of a call: how long it waits for its permit, and with which priority, within the rights of its caller."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from tidegate._limiter.waiting import MAX_PRIORITY
from tidegate.core._bounds import SECOND
from tidegate.core._limit import parse_period
from tidegate.egress._messages import PRIORITY, REQUEST_TIMEOUT, TAG, EgressError
from tidegate.egress._settings import TAG_NAME
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.egress._callers import EgressCaller
    from tidegate.egress._settings import EgressSettings


class CallOptions(NamedTuple):
    """How long a call waits, in seconds, its priority, and the kind of call whose outputs are learned separately."""

    timeout: float
    priority: float = 0.0
    tag: str = ""


def read_options(headers: Mapping[str, str], settings: EgressSettings, caller: EgressCaller) -> CallOptions:
    """Read the options of a call; the caller's rights bound its priority, the settings its wait."""
    timeout = settings.timeout
    if REQUEST_TIMEOUT not in headers and PRIORITY not in headers and TAG not in headers:
        return CallOptions(min(timeout, settings.whole_timeout))
    priority = 0.0
    if (text := headers.get(REQUEST_TIMEOUT)) is not None:
        timeout = _read_timeout(text)
    if (text := headers.get(PRIORITY)) is not None:
        priority = _read_number(PRIORITY, text)
    highest = min(caller.max_priority, MAX_PRIORITY)
    bounded = max(-float(MAX_PRIORITY), min(priority, highest))
    return CallOptions(min(timeout, settings.whole_timeout), bounded, _read_tag(headers.get(TAG, ""), caller))


def _read_tag(tag: str, caller: EgressCaller) -> str:
    """Read a tag, which the rights of the caller must list: a ceiling per tag is a new one for each."""
    if not tag:
        return ""
    if not TAG_NAME.fullmatch(tag):
        raise EgressError(400, "bad-header", f"{TAG}: expected at most 64 letters, digits and _ . : @ / + -")
    if caller.tags is not None and tag not in caller.tags:
        message = f"caller {caller.name} may not use the tag {tag}: list it in the tags of the caller"
        raise EgressError(403, "tag-not-allowed", message)
    return tag


def _read_timeout(text: str) -> float:
    try:
        return parse_period(text) / SECOND if text and not text[-1].isdigit() else _read_number(REQUEST_TIMEOUT, text)
    except ConfigError:
        raise EgressError(400, "bad-header", f"{REQUEST_TIMEOUT}: expected seconds or a duration such as 5s") from None


def _read_number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (name == REQUEST_TIMEOUT and value < 0):
        raise EgressError(400, "bad-header", f"{name}: expected a number")
    return value
