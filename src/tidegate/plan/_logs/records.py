"""Reads logs whose lines have named fields: JSON of Caddy, Traefik and Envoy, any JSON lines, and CSV.

A usage log of language models names a model and tokens instead of a path: its cost is what it used, by unit.
"""

from __future__ import annotations

import csv
import json
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._runtime.suggestions import did_you_mean
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.plan._logs.batch import NO_DURATION, NO_STATUS, BatchBuilder, LogBatch, LogSender, LogSubject
from tidegate.plan._logs.requests import read_path, read_request
from tidegate.plan._logs.text_lines import address_of, lines_of
from tidegate.plan._logs.timestamps import choose_reader, read_duration, resolution_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import tzinfo

DURATION_UNITS: Final = {"s": SECOND, "ms": 1000, "us": 1, "ns": 0}
KNOWN_NAMES: Final[dict[str, tuple[str, ...]]] = {  # of columns, in the order in which they are looked for
    "start": ("StartUTC", "start_time", "started_at", "start", "request_time_start"),
    "time": ("ts", "time", "timestamp", "@timestamp", "datetime", "date", "created_at", "created", "msec"),
    "duration": ("duration", "Duration", "latency", "request_time", "elapsed"),
    "peer": (
        "request.remote_ip", "ClientHost", "downstream_remote_address", "remote_addr", "client_ip", "client", "ip",
        "address", "peer",
    ),
    "forwarded": ("request.headers.X-Forwarded-For", "request_X-Forwarded-For", "x_forwarded_for", "forwarded_for"),
    "key": ("key", "user", "user_id", "api_key", "account", "tenant", "caller"),
    "policy": ("policy",),
    "request": ("request_line",),
    "method": ("request.method", "RequestMethod", "method", "request_method", "verb"),
    "path": ("request.uri", "RequestPath", "path", "request_uri", "uri"),
    "url": ("url",),
    "status": ("status", "DownstreamStatus", "response_code", "status_code", "code"),
    "model": ("model", "model_name"),
    "tokens": ("total_tokens", "tokens", "usage.total_tokens"),
    "input_tokens": ("input_tokens", "prompt_tokens", "usage.prompt_tokens", "usage.input_tokens"),
    "output_tokens": ("output_tokens", "completion_tokens", "usage.completion_tokens", "usage.output_tokens"),
    "usd": ("usd", "cost_usd", "price", "spend"),
    "cost": ("cost",),
}  # fmt: skip
UNITS: Final = {"tokens": "tokens", "input_tokens": "input-tokens", "output_tokens": "output-tokens"}
MICROS: Final = 1_000_000


class Columns(NamedTuple):
    """The columns of a log: for each field, the name of its column, and the unit of durations in microseconds."""

    names: Mapping[str, str]
    duration_unit: str = "s"

    @classmethod
    def detect(cls, record: Mapping[str, Any], given: Mapping[str, str]) -> Columns:
        """Find the columns in the first record; those that are given win. Raises ConfigError."""
        for name in given:
            if name not in KNOWN_NAMES and name != "duration_unit":
                expected = did_you_mean(name, KNOWN_NAMES) or f"expected one of {', '.join(KNOWN_NAMES)}"
                raise ConfigError(f"unknown field {name!r}: {expected}", field="--columns")
        for field, column in given.items():
            if field != "duration_unit" and value_of(record, column) is None:
                raise ConfigError(f"the first record has no {column!r}: it has {', '.join(record)}", field="--columns")
        names = {field: column for field, column in given.items() if field != "duration_unit"}
        for field, known in KNOWN_NAMES.items():
            found = [each for each in known if value_of(record, each) is not None]
            if found:
                names.setdefault(field, found[0])
        if "time" not in names and "start" not in names:
            raise ConfigError(
                f"has no column with a time: name it, as in --columns time=NAME; it has {', '.join(record)}",
                field="--columns",
            )
        return cls(names, given.get("duration_unit", guess_unit(names, record)))


def guess_unit(names: Mapping[str, str], record: Mapping[str, Any]) -> str:
    """Return the unit of durations: Traefik writes nanoseconds, Envoy milliseconds, others seconds."""
    if "StartUTC" in record:
        return "ns"
    column = names.get("duration", "")
    return "ms" if "start_time" in record or column.endswith("_ms") else "s"


def value_of(record: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - a value of JSON
    """Return a value, of a nested mapping by the names joined with dots; None: there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value[0] if isinstance(value, list) and value else value


class RecordLines:
    """A parser of lines with named fields."""

    def __init__(
        self, columns: Columns, first: Mapping[str, Any], zone: tzinfo, header: list[str] | None = None
    ) -> None:
        """Read records with these columns, like the first one; `header`: of CSV."""
        names = columns.names
        self._names = names
        self._header = header
        self.times_are_starts: bool = "start" in names
        self._time_column = names["start"] if self.times_are_starts else names["time"]
        text = str(value_of(first, self._time_column))
        try:
            self._read_time: Callable[[str], int] = choose_reader(text, zone)
        except ValueError as error:
            raise ConfigError(f"column {self._time_column}: {error}", field="--columns") from None
        self.resolution: int = resolution_of(text)
        self.has_durations: bool = "duration" in names
        if columns.duration_unit not in DURATION_UNITS:
            expected = f"expected one of {', '.join(DURATION_UNITS)}, not {columns.duration_unit!r}"
            raise ConfigError(expected, field="--columns duration_unit")
        self._unit = DURATION_UNITS[columns.duration_unit]
        self._by_key = "key" in names

    def parse(self, block: str, file: str, line: int) -> LogBatch:
        """Parse a block of lines, of which the first has this number."""
        builder = BatchBuilder()
        batch = builder.batch
        for number, text in enumerate(lines_of(block), start=line):
            batch.lines += 1
            if not text.strip():
                continue
            try:
                self._add(builder, self._read_record(text))
            except (ValueError, KeyError, TypeError, AttributeError, InvalidOperation) as error:
                batch.reject(file, number, describe(error), text)
        return batch

    def _read_record(self, text: str) -> Mapping[str, Any]:
        if self._header is None:
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ValueError("expected an object")
            return record
        row = next(csv.reader([text]))
        if len(row) != len(self._header):
            raise ValueError(f"expected {len(self._header)} columns, not {len(row)}")
        return dict(zip(self._header, row, strict=True))

    def _text(self, record: Mapping[str, Any], field: str) -> str:
        """Return a field as a string; empty if there is none."""
        value = value_of(record, self._names[field]) if field in self._names else None
        return "" if value is None else str(value)

    def _add(self, builder: BatchBuilder, record: Mapping[str, Any]) -> None:
        time = self._read_time(str(value_of(record, self._time_column)))
        duration = self._duration(record)
        if duration >= 0 and not self.times_are_starts:
            time -= duration
        if self._by_key:
            sender = LogSender(self._text(record, "key"))
        else:
            forwarded = self._text(record, "forwarded")
            sender = LogSender(address_of(self._text(record, "peer")), "" if forwarded == "-" else forwarded)
        status = self._text(record, "status")
        code = int(status) if status.isdecimal() and len(status) == 3 else NO_STATUS  # noqa: PLR2004 - of HTTP
        cost = self._cost(record)
        builder.add(time, sender, self._subject(record), duration=duration, status=code, cost=cost)

    def _duration(self, record: Mapping[str, Any]) -> int:
        text = self._text(record, "duration")
        if not text or text == "-":
            return NO_DURATION
        if self._unit == 0:  # nanoseconds
            return int(text.partition(".")[0]) // 1000
        return read_duration(format(Decimal(text), "f"), self._unit)

    def _subject(self, record: Mapping[str, Any]) -> LogSubject:
        names = self._names
        if "policy" in names:
            return LogSubject("", self._text(record, "policy"))
        if "request" in names:
            return read_request(self._text(record, "request"))
        method = self._text(record, "method").upper() or "GET"
        if "url" in names:
            return LogSubject(method, self._text(record, "url"))
        if "path" in names:
            return LogSubject(method, read_path(self._text(record, "path")))
        return LogSubject("", self._text(record, "model"))

    def _cost(self, record: Mapping[str, Any]) -> Mapping[str, int] | int:
        """Return the cost of a record: what it used by unit, or the number in its column `cost`, or 1."""
        amounts = {unit: amount(self._text(record, field)) for field, unit in UNITS.items() if field in self._names}
        if "tokens" not in amounts and amounts:
            amounts["tokens"] = sum(amounts.values())
        if "usd" in self._names:
            amounts["usd_micros"] = amount(self._text(record, "usd"), MICROS)
        if amounts:
            return {"requests": 1, **amounts}
        return amount(self._text(record, "cost") or "1")


def amount(text: str, scale: int = 1) -> int:
    """Read an amount that is not negative."""
    found = int(Decimal(text or "0") * scale)
    if found < 0:
        raise ValueError(f"expected an amount of at least 0, not {text!r}")
    return found


def describe(error: Exception) -> str:
    """Say what is wrong with a record."""
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, InvalidOperation):
        return "a number is expected in a column of durations or amounts"
    return str(error) or type(error).__name__
