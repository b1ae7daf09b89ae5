"""Reads the rate limit fields of another server, in any of the dialects in use.

The dialects (`headers/dialects.py`) are tried in order, newest first. The first one that says how much remains is used:
a server that sends two dialects describes the same limits twice. The fields that only one server sends
(`headers/servers.py`) describe further limits, so they are read in addition.

The fields come from other servers, so they are not trusted. A malformed field is ignored as a whole, absurd values are
clamped, and nothing raises. Advice is no guarantee: it may lower the number of permits left, never raise it above the
configured limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import http_sf

from tidegate.headers._dialects import (
    DIALECTS,
    FIELD_PREFIXES,
    RETRY_AFTER,
    RETRY_AFTER_MS,
    CountListField,
    Dialect,
    DictionaryField,
    GroupedFields,
    LimitFields,
    ListFields,
    OwnFields,
    ThreeFields,
    UsedOfLimitField,
)
from tidegate.headers._servers import OWN_FIELDS
from tidegate.headers._values import clamp, parse_retry_after, read_count, read_seconds, seconds_until, to_text

T = TypeVar("T")
Headers = Mapping[str, object] | Mapping[bytes, object] | Iterable[tuple[str | bytes, object]]
Fields = dict[str, list[str]]  # the values of all field lines by lower-case name, in order
ReadDialect = Callable[["Fields", float], "list[LimitAdvice]"]

MAX_LIMITS: Final = 32  # limits that are read from one response
PERIOD_SECONDS: Final = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86_400.0, "week": 604_800.0}
REQUEST_WORDS: Final = ("req", "request", "requests")


@dataclass(frozen=True, slots=True)
class LimitAdvice:
    """What a server announced about one limit; None if it did not say. `reset_after` and `window` are seconds."""

    name: str
    quota: int | None = None
    remaining: int | None = None
    reset_after: float | None = None
    unit: str = "requests"
    window: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What a server announced about its limits; falsy if it announced nothing.

    `retry_after` is in seconds and takes precedence over everything else. `remaining` is no guarantee: do not exceed it
    within `reset_after` seconds, and do not rely on it.
    """

    limits: tuple[LimitAdvice, ...] = ()
    retry_after: float | None = None

    @property
    def tightest(self) -> LimitAdvice | None:
        """The limit with the fewest permits left, of those with a known number."""
        known = [limit for limit in self.limits if limit.remaining is not None]
        return min(known, key=lambda limit: limit.remaining or 0, default=None)

    @property
    def remaining(self) -> int | None:
        """Permits left at the tightest limit."""
        return self.tightest.remaining if self.tightest else None

    @property
    def reset_after(self) -> float | None:
        """Seconds until the tightest limit resets."""
        return self.tightest.reset_after if self.tightest else None

    def __bool__(self) -> bool:
        """Return whether the server announced anything."""
        return bool(self.limits) or self.retry_after is not None


def read(headers: Headers | None, now: float) -> Advice:
    """Read what a server announced about its limits; `now` is the time of its response, in seconds since 1970.

    The headers are a mapping or a list of (name, value), as strings or bytes; names are case-insensitive. Fields that
    were sent several times are joined.
    """
    fields = select_fields(headers)
    found: list[LimitAdvice] = []
    for read_dialect in DIALECT_READERS:
        limits = read_dialect(fields, now)
        if any(limit.remaining is not None for limit in limits):
            found = limits
            break
        found = found or limits
    for read_own in OWN_READERS:
        found = [*found, *read_own(fields, now)]
    return Advice(tuple(found[:MAX_LIMITS]), _read_retry_after(fields, now))


def select_fields(headers: Headers | None) -> Fields:
    """Select the fields that may describe limits, by lower-case name."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    fields: Fields = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004 - a name and a value
            continue
        name = (to_text(pair[0]) or "").lower()
        if not name.startswith(FIELD_PREFIXES):
            continue
        values = pair[1] if isinstance(pair[1], (tuple, list)) else (pair[1],)
        texts = [text for text in map(to_text, values) if text is not None]
        if texts:
            fields.setdefault(name, []).extend(texts)
    return fields


def _read_retry_after(fields: Fields, now: float) -> float | None:
    """Return the longest requested wait, from the milliseconds field if it agrees with the seconds.

    Some servers send fractions of seconds, such as Shopify's `2.0`.
    """
    texts = fields.get(RETRY_AFTER.lower(), ())
    seconds = [wait if (wait := parse_retry_after(text, now)) is not None else read_seconds(text) for text in texts]
    longest = max((wait for wait in seconds if wait is not None), default=None)
    milliseconds = [text for name in RETRY_AFTER_MS for text in fields.get(name.lower(), ())]
    exact = [amount / 1000 for amount in map(read_count, milliseconds) if amount is not None]
    if exact and (longest is None or longest - max(exact) < 1):
        return clamp(max(exact))
    return longest


# ---- the IETF draft, from version 08 on ------------------------------------------------------------------------------


def _lists_reader(dialect: ListFields) -> ReadDialect:
    """Return a reader of RateLimit-Policy and RateLimit as lists of Strings with parameters."""

    def read_lists(fields: Fields, _now: float) -> list[LimitAdvice]:
        states = _read_items(fields, dialect.state, partial(_read_state, dialect))
        found = _read_items(fields, dialect.policy, partial(_read_policy, dialect))
        for name, state in states.items():
            policy = found.get(name, state)
            reset = state.reset_after
            found[name] = LimitAdvice(name, policy.quota, state.remaining, reset, policy.unit, policy.window)
        return list(found.values())

    return read_lists


def _read_items(
    fields: Fields, field: str, read_item: Callable[[str, dict[str, Any]], LimitAdvice | None]
) -> dict[str, LimitAdvice]:
    """Read a list of Strings, by their values; empty if the list or any of its items is malformed.

    If a name occurs twice, for two partitions, the one with less left is used.
    """
    found: dict[str, LimitAdvice] = {}
    for item in _parse_structured(fields, field, "list") or ():
        name, parameters = item if isinstance(item, tuple) else (item, {})
        # Neither a Token nor an inner list is a str.
        limit = read_item(name, parameters) if isinstance(name, str) else None
        if limit is None:
            return {}
        other = found.setdefault(name, limit)
        if (limit.remaining or 0, limit.quota or 0) < (other.remaining or 0, other.quota or 0):
            found[name] = limit
    return found


def _read_policy(dialect: ListFields, name: str, parameters: dict[str, Any]) -> LimitAdvice | None:
    quota, window = parameters.get(dialect.quota), parameters.get(dialect.window, 1)
    unit, key = parameters.get(dialect.unit, "requests"), parameters.get(dialect.partition, b"")
    if not (_is_count(quota) and _is_count(window) and window and isinstance(unit, str) and isinstance(key, bytes)):
        return None
    return LimitAdvice(name, quota, unit=unit, window=clamp(window) if dialect.window in parameters else None)


def _read_state(dialect: ListFields, name: str, parameters: dict[str, Any]) -> LimitAdvice | None:
    remaining, reset = parameters.get(dialect.remaining), parameters.get(dialect.reset, 0)
    key = parameters.get(dialect.partition, b"")
    if not (_is_count(remaining) and _is_count(reset) and isinstance(key, bytes)):
        return None
    return LimitAdvice(name, None, remaining, clamp(reset) if dialect.reset in parameters else None)


def _parse_structured(fields: Fields, field: str, kind: str) -> Any:  # noqa: ANN401 - any structured value
    """Parse a structured field (RFC 9651); None if it is missing or malformed."""
    text = to_text(", ".join(fields.get(field.lower(), ())))
    if not text or not text.isascii():
        return None
    try:
        return http_sf.parse(text.encode(), tltype=kind)
    except (ValueError, ArithmeticError):  # the parser's own error is a ValueError; dates and numbers may overflow
        return None


def _is_count(value: object) -> bool:
    """Return whether a bare item is a non-negative Integer, and no Boolean, Decimal or Date."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# ---- drafts 00 to 07, and X-RateLimit --------------------------------------------------------------------------------


def _dictionary_reader(dialect: DictionaryField) -> ReadDialect:
    """Return a reader of draft 07: a dictionary of limit, remaining and reset."""

    def read_dictionary(fields: Fields, _now: float) -> list[LimitAdvice]:
        members = _parse_structured(fields, dialect.state, "dictionary") or {}
        values = [members.get(name, (None, {})) for name in dialect.members]
        bare = [value[0] if isinstance(value, tuple) else value for value in values]
        if not all(map(_is_count, bare)):
            return []
        quota, remaining, reset = bare
        windows = {
            item[0]: item[1][dialect.window]
            for item in _parse_structured(fields, dialect.policy, "list") or ()
            if isinstance(item, tuple) and _is_count(item[0]) and _is_count(item[1].get(dialect.window))
        }
        window = windows.get(quota)
        return [LimitAdvice("default", quota, remaining, clamp(reset), window=clamp(window) if window else None)]

    return read_dictionary


def _three_fields_reader(dialect: ThreeFields) -> ReadDialect:
    """Return a reader of three fields with one number each: drafts 00 to 06, and X-RateLimit."""
    names = ThreeFields(*(name.lower() for name in dialect))

    def read_triple(fields: Fields, now: float) -> list[LimitAdvice]:
        quotas, windows = _read_quotas(fields.get(names.limit, ()))
        left, _ = _read_quotas(fields.get(names.remaining, ()))
        # A delay first: unlike an instant, it does not depend on the clocks.
        resets = _read_numbers(fields.get(names.reset_after, ()), lambda text: seconds_until(text, now))
        resets = resets or _read_numbers(fields.get(names.reset, ()), lambda text: seconds_until(text, now))
        if not quotas and not left:
            return []
        resource = (fields.get(names.resource) or fields.get(names.bucket) or ["default"])[0]
        if fields.get(names.is_global, [""])[0].lower() == "true":
            resource = "global"
        if len(quotas) == len(left) == len(resets) > 1:  # several limits, in the same order in each list
            rows = zip(quotas, left, resets, strict=True)
            return [LimitAdvice(f"{resource}-{i}", *row, window=windows.get(row[0])) for i, row in enumerate(rows, 1)]
        # Sent once, or several times by proxies on the way: then the safest value is used.
        quota = min(quotas, default=None)
        window = windows.get(quota) if quota is not None else None
        return [
            LimitAdvice(resource, quota, min(left, default=None), max(resets, default=None), window=window)
        ]  # fmt: skip

    return read_triple


def _read_quotas(texts: Iterable[str]) -> tuple[list[int], dict[int, float]]:
    """Read `100` or `100, 100;w=60`: the current quotas, and the windows of those that have one."""
    quotas, windows = [], {}
    for part in ",".join(texts).split(","):
        number, *parameters = (word.strip() for word in part.split(";"))
        quota = read_count(number)
        if quota is None:
            return [], {}
        found = [re.fullmatch(r"w=([0-9]{1,15})", word) for word in parameters]
        window = next((int(match[1]) for match in found if match), 0)
        if window:
            windows[quota] = clamp(window)
        if not parameters:
            quotas.append(quota)
    return quotas or list(windows), windows


def _read_numbers(texts: Iterable[str], parse: Callable[[str], T | None]) -> list[T]:
    """Read every value of a field; empty if one of them is malformed."""
    values: list[T] = []
    for text in texts:
        value = parse(text)  # the whole text first: a date contains a comma
        parts = [value] if value is not None else [parse(part.strip()) for part in text.split(",")]
        values += [part for part in parts if part is not None]
        if None in parts:
            return []
    return values


# ---- one field per limit and number: Anthropic, OpenAI, Kong ---------------------------------------------------------


def _grouped_fields_reader(dialect: GroupedFields) -> ReadDialect:
    """Return a reader of fields that have the name of the limit in their own names."""
    pattern = dialect.pattern()

    def read_grouped(fields: Fields, now: float) -> list[LimitAdvice]:
        groups: dict[str, dict[str, str]] = {}
        for field, texts in fields.items():
            match = pattern.fullmatch(field)
            if match:
                tier = match.groupdict().get("tier", "ratelimit")
                name = match["name"] if tier == "ratelimit" else f"{tier}-{match['name']}"
                groups.setdefault(name, {})[match["what"]] = texts[-1]
        return [limit for name, group in groups.items() if (limit := _read_group(dialect, name, group, now))]

    return read_grouped


def _read_group(dialect: GroupedFields, name: str, group: dict[str, str], now: float) -> LimitAdvice | None:
    quota, remaining = read_count(group.get("limit", "")), read_count(group.get("remaining", ""))
    if quota is None and remaining is None:
        return None
    words = name.replace("_", "-").split("-")
    window = next((PERIOD_SECONDS[word] for word in words if word in PERIOD_SECONDS), dialect.window)
    if "renewalperiod" in group:
        window = seconds_until(group["renewalperiod"], now) or window
    unit = dialect.unit or _unit_of(words)
    return LimitAdvice(name, quota, remaining, seconds_until(group.get("reset", ""), now), unit, window)


def _unit_of(words: list[str]) -> str:
    """Return the unit of a limit from the words of its name: `project-tokens`, `req-minute`, `minute`."""
    if "tokens" in words:
        return next((f"{kind}-tokens" for kind in ("input", "output") if kind in words), "tokens")
    words = [word for word in words if word not in PERIOD_SECONDS and word not in ("month", "year")]
    return "-".join(words) if words and not set(words).intersection(REQUEST_WORDS) else "requests"


# ---- fields that only one server sends -------------------------------------------------------------------------------


def _limit_fields_reader(own: LimitFields) -> ReadDialect:
    """Return a reader of the fields of one limit."""

    def read_limit(fields: Fields, _now: float) -> list[LimitAdvice]:
        quota, remaining, window = (
            read_count(fields.get(name, [""])[-1]) for name in (own.limit, own.remaining, own.window_ms)
        )
        if quota is None and remaining is None:
            return []
        return [LimitAdvice(own.name, quota, remaining, window=clamp(window / 1000) if window else own.window)]

    return read_limit


def _used_of_limit_reader(own: UsedOfLimitField) -> ReadDialect:
    """Return a reader of `32/40`: the used permits, and the limit."""

    def read_used(fields: Fields, _now: float) -> list[LimitAdvice]:
        used, _, limit = fields.get(own.field, [""])[-1].partition("/")
        taken, quota = read_count(used), read_count(limit)
        return [] if taken is None or quota is None else [LimitAdvice("default", quota, max(0, quota - taken))]

    return read_used


def _count_list_reader(own: CountListField) -> ReadDialect:
    """Return a reader of `Microsoft.Compute/HighCostGet3Min;107, ...`: the remaining permits, by name of the limit."""

    def read_counts(fields: Fields, _now: float) -> list[LimitAdvice]:
        found = []
        for part in ",".join(fields.get(own.field, ())).split(","):
            name, _, count = part.strip().rpartition(";")
            remaining, minutes = read_count(count), re.search(own.minutes, name)
            if not name or remaining is None:
                return []
            window = 60.0 * int(minutes[1]) if minutes else None
            found.append(LimitAdvice(name, None, remaining, window=clamp(window) if window else None))
        return found

    return read_counts


def _reader_of(dialect: Dialect) -> ReadDialect:
    """Return the reader of a dialect."""
    if isinstance(dialect, ListFields):
        return _lists_reader(dialect)
    if isinstance(dialect, DictionaryField):
        return _dictionary_reader(dialect)
    return _three_fields_reader(dialect) if isinstance(dialect, ThreeFields) else _grouped_fields_reader(dialect)


def _reader_of_own(own: OwnFields) -> ReadDialect:
    """Return the reader of fields that only one server sends."""
    if isinstance(own, GroupedFields):
        return _grouped_fields_reader(own)
    if isinstance(own, LimitFields):
        return _limit_fields_reader(own)
    return _used_of_limit_reader(own) if isinstance(own, UsedOfLimitField) else _count_list_reader(own)


DIALECT_READERS: Final = tuple(map(_reader_of, DIALECTS.values()))
OWN_READERS: Final = tuple(map(_reader_of_own, OWN_FIELDS))
