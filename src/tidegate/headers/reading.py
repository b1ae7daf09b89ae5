"""What another server says of its limits, in whatever generation of header fields it speaks.

The generations, newest first. The first one that tells what remains is believed: a server that sends two describes
the same limits twice:

    RateLimit-Policy: "burst";q=100;w=60     RateLimit: "burst";r=50;t=30         the IETF's, from draft 08 on
    RateLimit: limit=100, remaining=50, reset=5                                   draft 07
    RateLimit-Limit: 100, 100;w=60    RateLimit-Remaining: 50    RateLimit-Reset: 5    drafts 00 to 06
    anthropic-ratelimit-input-tokens-limit, -remaining, -reset                    Anthropic
    x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, ...                   OpenAI and alike; Kong (-minute)
    X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset                   GitHub and almost everybody else

All of it was written by a stranger. A malformed field is ignored as a whole, absurd values are clamped, and nothing
raises. Nothing read here is a promise: it may lower what we take to be left, never raise it above what is configured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import http_sf

from tidegate.headers.values import clamp, count, parse_retry_after, seconds_until, text_of

T = TypeVar("T")
Fields = dict[str, list[str]]  # by lower-case name: the value of every field line, in order

MOST: Final = 32  # limits that are read of one answer; nobody has more
GROUPED: Final = (
    re.compile(r"anthropic-(?P<tier>ratelimit|priority|fast)-(?P<name>(?:input-|output-)?tokens|requests)"
               r"-(?P<what>limit|remaining|reset)"),
    re.compile(r"x-rate-?limit-(?P<what>limit|remaining|reset|renewalperiod)-(?P<name>(?!after$)[a-z0-9_-]{1,64})"),
)  # fmt: skip
PERIODS: Final = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86_400.0, "week": 604_800.0}
CALLS: Final = ("req", "request", "requests")


@dataclass(frozen=True, slots=True)
class LimitAdvice:
    """What was said of one limit; None is what was not said. `reset_after` and `window` are seconds."""

    name: str
    quota: int | None = None
    remaining: int | None = None
    reset_after: float | None = None
    unit: str = "requests"
    window: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What a server said of its limits; false when it said nothing.

    `retry_after` is in seconds and comes before everything else. `remaining` is not a promise: do not exceed it within
    `reset_after` seconds, and do not count on it.
    """

    limits: tuple[LimitAdvice, ...] = ()
    retry_after: float | None = None

    @property
    def tightest(self) -> LimitAdvice | None:
        """The limit that has the fewest permits left, of those whose server told."""
        told = [limit for limit in self.limits if limit.remaining is not None]
        return min(told, key=lambda limit: limit.remaining or 0, default=None)

    @property
    def remaining(self) -> int | None:
        """Permits left at the tightest limit."""
        return self.tightest.remaining if self.tightest else None

    @property
    def reset_after(self) -> float | None:
        """Seconds until the tightest limit resets."""
        return self.tightest.reset_after if self.tightest else None

    def __bool__(self) -> bool:
        """Tell whether anything was said."""
        return bool(self.limits) or self.retry_after is not None


def read(headers: Mapping[Any, Any] | Iterable[Any] | None, now: float) -> Advice:
    """Read what a server said of its limits; `now` is the instant of its answer, in seconds since 1970.

    The headers are a mapping or a list of (name, value), text or bytes, in any case; fields that were sent several
    times are joined.
    """
    fields = collect(headers)
    found: list[LimitAdvice] = []
    for generation in GENERATIONS:
        limits = generation(fields, now)
        if any(limit.remaining is not None for limit in limits):
            found = limits
            break
        found = found or limits
    return Advice(tuple(found[:MOST]), _retry_after(fields, now))


def collect(headers: Mapping[Any, Any] | Iterable[Any] | None) -> Fields:
    """Keep the fields that may speak of limits, by lower-case name."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    fields: Fields = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004 - a name and a value
            continue
        name = (text_of(pair[0]) or "").lower()
        if not name.startswith(("ratelimit", "x-rate", "retry-after", "anthropic-")):
            continue
        values = pair[1] if isinstance(pair[1], (tuple, list)) else (pair[1],)
        texts = [text for text in map(text_of, values) if text is not None]
        if texts:
            fields.setdefault(name, []).extend(texts)
    return fields


def _retry_after(fields: Fields, now: float) -> float | None:
    """Give the longest wait that was asked for; milliseconds, where they agree with the seconds, are more exact."""
    seconds = [parse_retry_after(text, now) for text in fields.get("retry-after", ())]
    longest = max((wait for wait in seconds if wait is not None), default=None)
    exact = [amount / 1000 for amount in map(count, fields.get("retry-after-ms", ())) if amount is not None]
    if exact and (longest is None or longest - max(exact) < 1):
        return clamp(max(exact))
    return longest


# ---- the IETF's, from draft 08 on ------------------------------------------------------------------------------------


def _lists(fields: Fields, now: float) -> list[LimitAdvice]:
    """Read RateLimit-Policy and RateLimit as lists of Strings with parameters."""
    del now
    states = _items(fields, "ratelimit", _state)
    found = _items(fields, "ratelimit-policy", _policy)
    for name, state in states.items():
        policy = found.get(name, state)
        found[name] = LimitAdvice(name, policy.quota, state.remaining, state.reset_after, policy.unit, policy.window)
    return list(found.values())


def _items(
    fields: Fields, field: str, read_item: Callable[[str, dict[str, Any]], LimitAdvice | None]
) -> dict[str, LimitAdvice]:
    """Read a list of Strings, by their values; nothing if the list or any of its items is malformed.

    A name that comes twice, for two partitions, means the one with less left.
    """
    found: dict[str, LimitAdvice] = {}
    for item in _structured(fields, field, "list") or ():
        name, parameters = item if isinstance(item, tuple) else (item, {})
        # A Token is no str, an inner list neither.
        limit = read_item(name, parameters) if isinstance(name, str) else None
        if limit is None:
            return {}
        other = found.setdefault(name, limit)
        if (limit.remaining or 0, limit.quota or 0) < (other.remaining or 0, other.quota or 0):
            found[name] = limit
    return found


def _policy(name: str, parameters: dict[str, Any]) -> LimitAdvice | None:
    quota, window = parameters.get("q"), parameters.get("w", 1)
    unit, key = parameters.get("qu", "requests"), parameters.get("pk", b"")
    if not (_is_count(quota) and _is_count(window) and window and isinstance(unit, str) and isinstance(key, bytes)):
        return None
    return LimitAdvice(name, quota, unit=unit, window=clamp(window) if "w" in parameters else None)


def _state(name: str, parameters: dict[str, Any]) -> LimitAdvice | None:
    remaining, reset, key = parameters.get("r"), parameters.get("t", 0), parameters.get("pk", b"")
    if not (_is_count(remaining) and _is_count(reset) and isinstance(key, bytes)):
        return None
    return LimitAdvice(name, None, remaining, clamp(reset) if "t" in parameters else None)


def _structured(fields: Fields, field: str, kind: str) -> Any:  # noqa: ANN401 - whatever the field holds
    """Parse a structured field of RFC 9651; None if there is none or it is malformed."""
    text = text_of(", ".join(fields.get(field, ())))
    if not text or not text.isascii():
        return None
    try:
        return http_sf.parse(text.encode(), tltype=kind)
    except (ValueError, ArithmeticError):  # the parser's own error is a ValueError; dates and numbers may overflow
        return None


def _is_count(value: object) -> bool:
    """Tell whether a bare item is an Integer that is not negative: no Boolean, Decimal or Date."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# ---- drafts 00 to 07, and X-RateLimit --------------------------------------------------------------------------------


def _dictionary(fields: Fields, now: float) -> list[LimitAdvice]:
    """Read draft 07: a dictionary of limit, remaining and reset."""
    del now
    members = _structured(fields, "ratelimit", "dictionary") or {}
    values = [members.get(name, (None, {})) for name in ("limit", "remaining", "reset")]
    bare = [value[0] if isinstance(value, tuple) else value for value in values]
    if not all(map(_is_count, bare)):
        return []
    quota, remaining, reset = bare
    windows = {
        item[0]: item[1]["w"]
        for item in _structured(fields, "ratelimit-policy", "list") or ()
        if isinstance(item, tuple) and _is_count(item[0]) and _is_count(item[1].get("w"))
    }
    window = windows.get(quota)
    return [LimitAdvice("default", quota, remaining, clamp(reset), window=clamp(window) if window else None)]


def _triple(prefix: str) -> Callable[[Fields, float], list[LimitAdvice]]:
    """Read three fields with one number each: drafts 00 to 06, and X-RateLimit."""

    def read_triple(fields: Fields, now: float) -> list[LimitAdvice]:
        quotas, windows = _quotas(fields.get(f"{prefix}-limit", ()))
        left = _numbers(fields.get(f"{prefix}-remaining", ()), count)
        resets = _numbers(fields.get(f"{prefix}-reset", ()), lambda text: seconds_until(text, now))
        resets = resets or _numbers(fields.get(f"{prefix}-reset-after", ()), lambda text: seconds_until(text, now))
        if not quotas and not left:
            return []
        resource = fields.get(f"{prefix}-resource", ["default"])[0]
        if len(quotas) == len(left) == len(resets) > 1:  # several limits, each with its place in the lists
            rows = zip(quotas, left, resets, strict=True)
            return [LimitAdvice(f"{resource}-{i}", *row, window=windows.get(row[0])) for i, row in enumerate(rows, 1)]
        # Sent once; or, by proxies on the way, several times: then what is safest to believe.
        quota = min(quotas, default=None)
        window = windows.get(quota) if quota is not None else None
        return [
            LimitAdvice(resource, quota, min(left, default=None), max(resets, default=None), window=window)
        ]  # fmt: skip

    return read_triple


def _quotas(texts: Iterable[str]) -> tuple[list[int], dict[int, float]]:
    """Read `100` or `100, 100;w=60`: quotas in force, and the windows of those that come with one."""
    quotas, windows = [], {}
    for part in ",".join(texts).split(","):
        number, *parameters = (word.strip() for word in part.split(";"))
        quota = count(number)
        if quota is None:
            return [], {}
        found = [re.fullmatch(r"w=([0-9]{1,15})", word) for word in parameters]
        window = next((int(match[1]) for match in found if match), 0)
        if window:
            windows[quota] = clamp(window)
        if not parameters:
            quotas.append(quota)
    return quotas or list(windows), windows


def _numbers(texts: Iterable[str], parse: Callable[[str], T | None]) -> list[T]:
    """Read every value of a field, or nothing if one of them is malformed."""
    values: list[T] = []
    for text in texts:
        value = parse(text)  # as a whole first: a date has a comma
        parts = [value] if value is not None else [parse(part.strip()) for part in text.split(",")]
        values += [part for part in parts if part is not None]
        if None in parts:
            return []
    return values


# ---- one field per limit and number: Anthropic, OpenAI, Kong ---------------------------------------------------------


def _grouped(pattern: re.Pattern[str]) -> Callable[[Fields, float], list[LimitAdvice]]:
    """Read fields whose names tell of which limit they speak."""

    def read_grouped(fields: Fields, now: float) -> list[LimitAdvice]:
        groups: dict[str, dict[str, str]] = {}
        for field, texts in fields.items():
            match = pattern.fullmatch(field)
            if match:
                tier = match.groupdict().get("tier", "ratelimit")
                name = match["name"] if tier == "ratelimit" else f"{tier}-{match['name']}"
                groups.setdefault(name, {})[match["what"]] = texts[-1]
        return [limit for name, group in groups.items() if (limit := _group(name, group, now))]

    return read_grouped


def _group(name: str, group: dict[str, str], now: float) -> LimitAdvice | None:
    quota, remaining = count(group.get("limit", "")), count(group.get("remaining", ""))
    if quota is None and remaining is None:
        return None
    words = name.replace("_", "-").split("-")
    window = next((PERIODS[word] for word in words if word in PERIODS), None)
    if "renewalperiod" in group:
        window = seconds_until(group["renewalperiod"], now) or window
    return LimitAdvice(name, quota, remaining, seconds_until(group.get("reset", ""), now), _unit(words), window)


def _unit(words: list[str]) -> str:
    """Tell what a limit counts by the words of its name: `project-tokens`, `input-tokens`, `req-minute`, `minute`."""
    if "tokens" in words:
        return next((f"{kind}-tokens" for kind in ("input", "output") if kind in words), "tokens")
    words = [word for word in words if word not in PERIODS and word not in ("month", "year")]
    return "-".join(words) if words and not set(words).intersection(CALLS) else "requests"


GENERATIONS: Final[tuple[Callable[[Fields, float], list[LimitAdvice]], ...]] = (
    _lists,
    _dictionary,
    _triple("ratelimit"),
    *map(_grouped, GROUPED),
    _triple("x-ratelimit"),
    _triple("x-rate-limit"),
)
