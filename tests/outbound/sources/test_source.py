"""A source's file, and when a source is due."""

from datetime import UTC, datetime

import pytest

from tests.cases import cases
from tidegate import ConfigError
from tidegate.outbound.sources import Source, read_sources
from tidegate.outbound.sources._schedule import Cron, Interval, read_cron
from tidegate.outbound.sources._source import Destination, parse_source

MINUTE = 60_000_000


def test_the_source_of_the_specification():
    """The literal file of the document: a name and a URL."""
    text = "name: fmp-aapl-prices\nurl: https://financialmodelingprep.com/api/v3/historical-price-full/AAPL\n"
    url = "https://financialmodelingprep.com/api/v3/historical-price-full/AAPL"
    assert parse_source(text) == Source("fmp-aapl-prices", url, None)
    assert parse_source(text + "interval: 5m\n") == Source("fmp-aapl-prices", url, Interval(5 * MINUTE))


def test_all_fields_of_a_source():
    source = parse_source(
        """
        name: quotes
        url: https://example.com/quotes
        cron: "*/5 9-17 * * 1-5"
        timezone: America/New_York
        method: post
        headers: {Accept: text/csv, Authorization: Bearer hunter2}
        body: '{"all": true}'
        priority: 2
        timeout: 10s
        retries: 5
        to: {webhook: https://example.net/in}
        """
    )
    assert source.schedule == Cron("*/5 9-17 * * 1-5", "America/New_York")
    assert (source.method, source.priority, source.timeout, source.retries) == ("POST", 2, 10.0, 5)
    assert source.destination == Destination("webhook", "https://example.net/in")
    assert source.headers["Authorization"] == "Bearer hunter2"
    assert "hunter2" not in repr(source)


@cases(
    ("text", "message"),
    [
        ("url: https://a.test/", "f.yaml:1: needs a name, such as name: prices"),
        ("name: a", "f.yaml:1: needs a url, such as url: https://example.com/prices"),
        ("name: a/b\nurl: https://a.test/", "f.yaml:1: name: expected a name of letters, digits"),
        ("name: a\nurl: a.test", "f.yaml:2: url: expected a URL with a host"),
        ("name: a\nurl: ftp://a.test/x\ninterval: 1m", "f.yaml:2: url: expected a URL that begins with http"),
        (
            "name: a\nurl: https://a.test/\ninterval: 1m\ncron: '* * * * *'",
            "f.yaml:4: cron: cannot be combined with 'interval'",
        ),
        ("name: a\nurl: https://a.test/\ntimezone: UTC", "f.yaml:3: timezone: can only be combined with 'cron'"),
        ("name: a\nurl: https://a.test/\ninterval: soon", "f.yaml:3: interval: unknown unit of time"),
        ("name: a\nurl: https://a.test/\ncron: '61 * * * *'", "f.yaml:3: cron: Bad minute: expected a cron expression"),
        ("name: a\nurl: https://a.test/\ncron: '0 0 30 2 *'", "f.yaml:3: cron: "),
        ("name: a\nurl: https://a.test/\ncron: '* * * * *'\ntimezone: Mars", "f.yaml:4: timezone: unknown time zone"),
        (
            "name: a\nurl: https://a.test/\ninterval: 1m\ntimezone: UTC",
            "f.yaml:4: timezone: can only be combined with 'cron'",
        ),
        ("name: a\nurl: https://a.test/\ninterval: 1m\nto: {files: x, sqlite: y}", "f.yaml:4: to: expected one of"),
        (
            "name: a\nurl: https://a.test/\ninterval: 1m\nto: {webhook: y}",
            "f.yaml:4: to.webhook: expected a URL with a host",
        ),
        (
            "name: a\nurl: https://a.test/\nintervall: 1m",
            "f.yaml:3: intervall: unknown setting: did you mean 'interval'?",
        ),
    ],
)
def test_invalid_sources_are_refused_with_line_and_field(text, message):
    with pytest.raises(ConfigError) as error:
        parse_source(text, "f.yaml")
    assert str(error.value).startswith(message)


def test_names_are_unique_over_files_and_directories(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for path in (folder / "one.yaml", folder / "two.yml", tmp_path / "three.yaml"):
        path.write_text(f"name: {path.stem}\nurl: https://a.test/\ninterval: 1m\n")
    found = read_sources([tmp_path / "three.yaml"], [folder])
    assert [source.name for source in found] == ["three", "one", "two"]
    (folder / "other.yaml").write_text("name: three\nurl: https://a.test/\ninterval: 1m\n")
    with pytest.raises(ConfigError, match=r"other\.yaml and .*three\.yaml: two sources are named 'three'"):
        read_sources([tmp_path / "three.yaml"], [folder])
    with pytest.raises(ConfigError, match="cannot be listed"):
        read_sources([], [tmp_path / "nowhere"])


def test_an_interval_skips_missed_runs():
    every = Interval(5 * MINUTE)
    assert every.after(0, 0) == 5 * MINUTE
    assert every.after(0, 7) == 5 * MINUTE
    assert every.after(0, 5 * MINUTE) == 10 * MINUTE
    assert every.after(0, 61 * MINUTE) == 65 * MINUTE


def micros(*instant):
    return int(datetime(*instant, tzinfo=UTC).timestamp()) * 1_000_000


def test_cron_handles_time_zones_and_daylight_saving():
    daily = read_cron("30 9 * * *", "America/New_York")
    assert daily.after(0, micros(2025, 3, 8, 15)) == micros(2025, 3, 9, 13, 30)  # summer time begins that night
    assert daily.after(0, micros(2025, 3, 8, 14, 30)) == micros(2025, 3, 9, 13, 30)
    assert daily.after(0, micros(2025, 3, 8, 14, 29)) == micros(2025, 3, 8, 14, 30)
