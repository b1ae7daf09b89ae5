"""What the body of a refusal (429 or 503) says, as the provider's profile describes it.

    {"error": {"message": "Rate limit reached … Please try again in 1.2s."}}                 OpenAI
    {"error": {"details": [{"@type": "….RetryInfo", "retryDelay": "34s"}, …]}}                Gemini

Bodies are untrusted: whatever is not understood is ignored, and nothing raises. Since a body may never end, only its
start is read (`RefusalBody`); the client still gets all of it. A Retry-After header takes precedence.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from tidegate.core._bounds import SECOND
from tidegate.headers import Advice, LimitAdvice
from tidegate.outbound._providers.profile import Profile, RefusalRule, values_at
from tidegate.outbound._quota.decoding import BodyDecoder, DecodingError
from tidegate.outbound._quota.json_body import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import CallFlow
    from tidegate.outbound._quota.exchange import ProviderResponse

MAX_BODY_BYTES: Final = 2**16  # of a refusal that are read, as sent and decoded
MAX_READ_TIME: Final = 5 * SECOND  # microseconds for reading it
MAX_RETRY_AFTER: Final = 86_400.0  # seconds: no pause is longer than a day
MAX_DIGITS: Final = 15  # of a quota
MAX_TEXT: Final = 10_000  # characters of a message that are searched
UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|)")
PERIODS: Final = {"day": 86_400.0, "hour": 3600.0, "minute": 60.0, "min": 60.0}
# A refusal means that a quota of at least this period (seconds) is used up. A shorter one recovers within Retry-After.
USED_UP_PERIOD: Final = 3600.0
UNITS: Final = {"requests": "requests", "tokens": "tokens", "inputtokens": "input-tokens"}


class RefusalBody:
    """The start of the body of a refusal: as it was sent (`pieces`), and decoded (`content`)."""

    def __init__(self, clock: Clock, coding: str = "") -> None:
        """Decode this Content-Encoding; a body with an unsupported one says nothing."""
        self.pieces: list[bytes] = []
        self.content: bytes = b""
        self._clock = clock
        self._until = clock.steady() + MAX_READ_TIME
        self._size = 0
        self._decoder: BodyDecoder | None = None
        try:
            self._decoder = BodyDecoder(coding)
        except DecodingError:
            return

    def add(self, piece: bytes) -> bool:
        """Add the next piece of the body; returns whether to read on."""
        self.pieces.append(piece)
        self._size += len(piece)
        if self._decoder is None:
            return False
        try:
            for part in self._decoder.feed(piece):
                self.content += part
                if len(self.content) > MAX_BODY_BYTES:
                    return False
        except DecodingError:
            return False
        return self._size <= MAX_BODY_BYTES and self._clock.steady() < self._until


def read_refusal_flow(profile: Profile, response: ProviderResponse, advice: Advice) -> CallFlow[Advice]:
    """Return what a refusal says: its headers, completed by its body. Limits are those of its body."""
    if response.read is None or not profile.refusals:
        return Advice((), advice.retry_after)
    try:
        body = yield response.read
    except GeneratorExit:
        raise
    except Exception:  # noqa: BLE001 - the client reports it
        return Advice((), advice.retry_after)
    told = read_refusal(profile, body)
    return Advice(told.limits, told.retry_after if advice.retry_after is None else advice.retry_after)


def read_refusal(profile: Profile, body: bytes) -> Advice:
    """Read the body of a refusal."""
    document = read_json(body)
    if not document and body.lstrip().startswith(b"["):  # Gemini streams refuse with a list of one
        document = read_json(body.strip()[1:-1])
    retry_after: float | None = None
    limits: dict[tuple[str, float], LimitAdvice] = {}
    for rule in profile.refusals:
        for found in _matches(document, rule):
            if rule.says == "retry_after":
                retry_after = read_duration(found["retry_after"]) if retry_after is None else retry_after
                continue
            unit, period = UNITS.get(found["unit"].lower()), PERIODS.get(found["period"].lower())
            if unit is not None and period is not None:
                quota = read_count(found.groupdict().get("limit"))
                left = 0 if period >= USED_UP_PERIOD else None
                limits[unit, period] = LimitAdvice(found[0], quota, left, unit=unit, window=period)
    return Advice(tuple(limits.values()), retry_after)


def _matches(document: dict[str, Any], rule: RefusalRule) -> Iterator[re.Match[str]]:
    for value in values_at(document, rule.field):
        found = rule.pattern.search(str(value)[:MAX_TEXT]) if isinstance(value, (str, int, float)) else None
        if found is not None:
            yield found


def read_count(text: str | None) -> int | None:
    """Read `30000` or `30,000`; None: it is no count."""
    digits = (text or "").replace(",", "")
    return int(digits) if digits.isdecimal() and len(digits) <= MAX_DIGITS else None


def read_duration(text: str) -> float | None:
    """Read `1.2s`, `20ms` or `6m0s` as seconds; None: it is no duration."""
    parts = DURATION.findall(text[:40])
    if not parts or "".join(map("".join, parts)) != text[:40].strip():
        return None
    found = math.fsum(float(number) * UNIT_SECONDS[unit] for number, unit in parts)
    return min(found, MAX_RETRY_AFTER)
