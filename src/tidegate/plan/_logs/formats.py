"""The formats of logs that are known, and how the format of a file is found in its first lines."""

from __future__ import annotations

import csv
import json
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tidegate.errors import ConfigError
from tidegate.plan._logs.records import Columns, RecordLines, value_of
from tidegate.plan._logs.text_lines import ALB, COMBINED, TextLines, compile_pattern
from tidegate.plan._logs.timestamps import has_no_offset

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import tzinfo

    from tidegate.plan._logs.batch import LogBatch

FORMATS: Final = ("combined", "alb", "json", "csv")  # `json` includes Caddy, Envoy and Traefik


class LogParser(Protocol):
    """Parses blocks of lines."""

    resolution: int  # of its times, in microseconds
    times_are_starts: bool  # whether they are when a request arrived, not when it was answered
    has_durations: bool

    def parse(self, block: str, file: str, line: int) -> LogBatch:
        """Parse a block of lines, of which the first has this number."""


class LogOptions(NamedTuple):
    """How to read logs: the format (empty: detected), a `log_format`, the columns, the zone of local times."""

    format: str = ""
    log_format: str = ""
    columns: Mapping[str, str] = {}
    zone: tzinfo = UTC


class FoundFormat(NamedTuple):
    """A parser for a file; the number of header lines; and whether its blocks have to be parsed in order."""

    name: str
    parser: LogParser
    skipped: int = 0
    in_order: bool = False


def find_format(sample: str, options: LogOptions) -> FoundFormat:
    """Return the parser for a file that begins with these lines; raises ConfigError."""
    if options.log_format:
        return FoundFormat("log_format", TextLines(compile_pattern(options.log_format), sample))
    name = options.format or detect(sample)
    if name not in FORMATS:
        raise ConfigError(f"expected one of {', '.join(FORMATS)}, not {name!r}", field="--format")
    if name in ("combined", "alb"):
        return FoundFormat(name, TextLines(compile_pattern(COMBINED if name == "combined" else ALB), sample))
    header, first = read_first(sample, name)
    columns = Columns.detect(first, options.columns)
    parser = RecordLines(columns, first, options.zone, header)
    time = str(value_of(first, columns.names["start" if parser.times_are_starts else "time"]))
    return FoundFormat(name, parser, int(header is not None), has_no_offset(time))


def detect(sample: str) -> str:
    """Return the name of the format of some lines; raises ConfigError."""
    for line in sample.splitlines()[:20]:
        if line.startswith("{"):
            return "json"
        for name, text in (("combined", COMBINED), ("alb", ALB)):
            if compile_pattern(text).expression.fullmatch(line):
                return name
    first = sample.partition("\n")[0]
    if "," in first and len(sample.splitlines()) > 1:
        return "csv"
    raise ConfigError(
        "the format is not known: name it with --format, or give the log_format of your server with --log-format; the "
        f"first line is {first[:120]!r}",
        field="--format",
    )


def read_first(sample: str, name: str) -> tuple[list[str] | None, Mapping[str, Any]]:
    """Return the header of CSV, and the first record that can be read."""
    lines = [line for line in sample.splitlines() if line.strip()]
    if name == "csv":
        rows = list(csv.reader(lines[:50]))
        header = [column.strip() for column in rows[0]]
        for row in rows[1:]:
            if len(row) == len(header):
                return header, dict(zip(header, row, strict=True))
    for line in lines:
        try:
            record = json.loads(line) if name == "json" else None
        except ValueError:
            continue
        if isinstance(record, dict):
            return None, record
    raise ConfigError(f"has no record that can be read as {name}; the first line is {lines[0][:120]!r}")
