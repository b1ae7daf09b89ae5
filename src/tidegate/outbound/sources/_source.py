"""A Source: a URL that is fetched on a schedule, and its YAML file.

name: fmp-aapl-prices
url: https://financialmodelingprep.com/api/v3/historical-price-full/AAPL
interval: 5m                        # or cron: "*/5 9-17 * * 1-5", with a timezone; every hour by default
to: {files: prices}                 # or {sqlite: prices.db}, or {webhook: https://…}
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tidegate._policy.config_value import ConfigValue, load, parse
from tidegate._runtime.urls import redact
from tidegate.core._bounds import SECOND
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError
from tidegate.outbound._providers.hosts import host_of
from tidegate.outbound._providers.watched_files import WatchedFiles
from tidegate.outbound.sources._schedule import Interval, Schedule, read_cron

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SOURCE_FIELDS: Final = (
    "name",
    "url",
    "interval",
    "cron",
    "timezone",
    "method",
    "headers",
    "body",
    "priority",
    "timeout",
    "max_bytes",
    "retries",
    "to",
)
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # also used as a folder name
MAX_BYTES: Final = 32 * 2**20  # of a body, by default


class Destination(NamedTuple):
    """Where bodies are delivered: files in a folder, rows of an SQLite database, or a POST to a URL."""

    kind: Literal["files", "sqlite", "webhook"]
    place: str

    def __repr__(self) -> str:
        """Hide the password of a webhook URL."""
        return f"Destination({self.kind!r}, {redact(self.place) if self.kind == 'webhook' else self.place!r})"


@dataclass(frozen=True, slots=True)
class Source:
    """What to fetch, when, and where the body is delivered. URL, headers and body may contain secrets: repr hides them.

    Without a `schedule`, the interval of the service applies, an hour by default.
    `timeout` is for the whole exchange, in seconds; `max_bytes` is for the decoded body.
    """

    name: str
    url: str = field(repr=False)
    schedule: Schedule | None = None
    destination: Destination = Destination("files", "bodies")  # noqa: RUF009 - immutable
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: str | None = field(default=None, repr=False)
    priority: int = 0
    timeout: float = 30.0
    retries: int = 3
    max_bytes: int = MAX_BYTES


def read_sources(files: Iterable[Path | str] = (), directories: Iterable[Path | str] = ()) -> list[Source]:
    """Read one file per source, and all files of a directory that end in .yaml or .yml; names must be unique."""
    found = WatchedFiles("source", read_source, files, directories).load()
    check_names(found)
    return list(found.values())


def check_names(found: Mapping[Path, Source]) -> None:
    """Raise ConfigError if two files have a source of the same name."""
    names: dict[str, Path] = {}
    for path, source in found.items():
        if names.setdefault(source.name, path) != path:
            raise ConfigError(describe_conflict(path, names[source.name], source.name))


def describe_conflict(path: Path, other: Path, name: str) -> str:
    """Describe two files that have a source of the same name."""
    return f"{path} and {other}: two sources are named {name!r}; remove one"


def read_source(given: str | Path | Mapping[str, object]) -> Source:
    """Read a source from a file or a mapping."""
    return _source(load(given))


def parse_source(text: str, file: str | None = None) -> Source:
    """Read a source from YAML text; `file` is its name in errors."""
    return _source(parse(text, file))


def _source(section: ConfigValue) -> Source:
    fields = section.fields(*SOURCE_FIELDS)
    for needed, example in (("name", "prices"), ("url", "https://example.com/prices")):
        if needed not in fields:
            raise section.error(f"needs a {needed}, such as {needed}: {example}")
    name = fields["name"].string()
    if not NAME_PATTERN.fullmatch(name):
        raise fields["name"].error(
            f"expected a name of letters, digits, dots, dashes and underscores, not {fields['name']}"
        )

    url = fields["url"].string()
    with fields["url"].locate_errors(url=fields["url"]):
        host_of(url)
    if not url.lower().startswith(("http://", "https://")):
        raise fields["url"].error(f"expected a URL that begins with http:// or https://, not {fields['url']}")
    return Source(
        name,
        url,
        _schedule(fields),
        _destination(fields["to"]) if "to" in fields else Destination("files", "bodies"),
        fields["method"].string().upper() if "method" in fields else "GET",
        {name: each.string() for name, each in fields["headers"].entries().items()} if "headers" in fields else {},
        fields["body"].string() if "body" in fields else None,
        fields["priority"].integer(-100, 100) if "priority" in fields else 0,
        _seconds(fields["timeout"]) if "timeout" in fields else 30.0,
        fields["retries"].integer(0, 100) if "retries" in fields else 3,
        fields["max_bytes"].integer() if "max_bytes" in fields else MAX_BYTES,
    )


def _schedule(fields: dict[str, ConfigValue]) -> Schedule | None:
    if "cron" not in fields:
        if "timezone" in fields:
            raise fields["timezone"].error("can only be combined with 'cron'")
        return Interval(round(_seconds(fields["interval"]) * SECOND)) if "interval" in fields else None
    if "interval" in fields:
        raise fields["cron"].error("cannot be combined with 'interval'")
    zone = fields["timezone"].string() if "timezone" in fields else "UTC"
    with fields["cron"].locate_errors(cron=fields["cron"], timezone=fields.get("timezone")):
        return read_cron(fields["cron"].string(), zone)


def _destination(setting: ConfigValue) -> Destination:
    places = setting.fields("files", "sqlite", "webhook")
    if len(places) != 1:
        raise setting.error("expected one of {files: folder}, {sqlite: file} or {webhook: URL}")
    ((kind, place),) = places.items()
    if kind == "webhook":
        with place.locate_errors(url=place):
            host_of(place.string())
    return Destination(kind, place.string())  # type: ignore[arg-type]  # one of the three


def _seconds(setting: ConfigValue) -> float:
    with setting.locate_errors(period=setting):
        return parse_period(setting.string()) / SECOND
