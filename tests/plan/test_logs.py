"""Readers of logs: each format gives the same requests; what cannot be read is counted with its line number."""

import gzip
import json
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from tidegate.errors import ConfigError
from tidegate.plan._logs.batch import LogSender, LogSubject
from tidegate.plan._logs.formats import LogOptions
from tidegate.plan._logs.stream import LogStream
from tidegate.plan._logs.timestamps import LocalTimes, microseconds, read_common, read_epoch, resolution_of

AT = microseconds(datetime(2026, 10, 10, 13, 55, 36, 500_000, tzinfo=UTC))  # the request arrives
SECOND = 1_000_000


class Plain:
    """Resolves senders and subjects to themselves."""

    def find_sender(self, sender):
        return sender

    def find_subject(self, subject):
        return subject


def read(paths, **options):
    stream = LogStream(paths, LogOptions(**options))
    rows = [row for rows in stream.read(Plain()) for row in rows]
    return rows, stream.summary


def read_text(tmp_path, text, **options):
    path = tmp_path / "some.log"
    path.write_text(text, encoding="utf-8", newline="")
    return read([path], **options)


FORMATS = {
    "combined": (
        '203.0.113.9 - frank [10/Oct/2026:15:55:36 +0200] "GET /a%20b?id=1 HTTP/1.1" 200 23 "-" "curl"',
        {},
        AT - SECOND // 2,
        -1,
    ),
    "common": ('203.0.113.9 - - [10/Oct/2026:13:55:36 +0000] "GET /a%20b HTTP/1.1" 200 23', {}, AT - SECOND // 2, -1),
    "nginx": (
        '1791640536.750|203.0.113.9|"GET /a\\x20b HTTP/1.1"|200|0.250',
        {"log_format": '$msec|$remote_addr|"$request"|$status|$request_time'},
        AT,
        SECOND // 4,
    ),
    "apache": (
        '203.0.113.9 [10/Oct/2026:13:55:36 +0000] "GET /a%20b HTTP/1.1" 200 250000',
        {"log_format": '%h %t "%r" %>s %D'},
        AT - SECOND // 2,
        SECOND // 4,
    ),
    "alb": (
        (
            "https 2026-10-10T13:55:36.750000Z app/lb/1 203.0.113.9:4711 10.0.0.1:80 0.0 0.2 0.0 200 200 34 366 "
            '"GET https://x.example:443/a%20b HTTP/1.1" "curl" - - arn "Root=1" "-" "-" 0 2026-10-10T13:55:36.500000Z '
            '"forward" "-" "-" "10.0.0.1:80" "200" "-" "-"'
        ),
        {},
        AT,
        SECOND // 4,
    ),
    "caddy": (
        json.dumps(
            {
                "level": "info",
                "ts": 1791640536.75,
                "request": {"remote_ip": "203.0.113.9", "method": "GET", "uri": "/a%20b?x"},
                "duration": 0.25,
                "status": 200,
            }
        ),
        {},
        AT,
        SECOND // 4,
    ),
    "traefik": (
        json.dumps(
            {
                "StartUTC": "2026-10-10T13:55:36.500000000Z",
                "Duration": 250_000_000,
                "ClientHost": "203.0.113.9",
                "RequestMethod": "GET",
                "RequestPath": "/a%20b",
                "DownstreamStatus": 200,
                "time": "2026-10-10T13:55:36Z",
            }
        ),
        {},
        AT,
        SECOND // 4,
    ),
    "envoy": (
        json.dumps(
            {
                "start_time": "2026-10-10T13:55:36.500Z",
                "duration": 250,
                "method": "GET",
                "path": "/a%20b",
                "response_code": 200,
                "downstream_remote_address": "203.0.113.9:4711",
            }
        ),
        {},
        AT,
        SECOND // 4,
    ),
    "csv": (
        "when,who,verb,uri,status,ms\n2026-10-10T13:55:36.750Z,203.0.113.9,GET,/a%20b,200,250",
        {"columns": {"time": "when", "peer": "who", "duration": "ms", "duration_unit": "ms"}},
        AT,
        SECOND // 4,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_request_and_its_arrival(name, tmp_path):
    text, options, at, duration = FORMATS[name]
    rows, summary = read_text(tmp_path, f"{text}\n", **options)
    assert rows == [(at, LogSender("203.0.113.9"), LogSubject("GET", "/a b"), 200, duration, 1)]
    assert (summary.requests, summary.malformed) == (1, 0)
    assert summary.has_durations == (duration >= 0)


def test_a_usage_log_of_a_language_model_has_costs(tmp_path):
    lines = [
        {"timestamp": 1791640536, "model": "gpt-x", "input_tokens": 100, "output_tokens": 20, "usd": "0.0125"},
        {"timestamp": 1791640537, "model": "gpt-x", "input_tokens": 1, "output_tokens": 2, "usd": 0},
    ]
    rows, _ = read_text(tmp_path, "".join(json.dumps(line) + "\n" for line in lines))
    tokens = {"requests": 1, "input-tokens": 100, "output-tokens": 20, "tokens": 120, "usd_micros": 12_500}
    assert [(row[2], row[5]) for row in rows] == [
        (LogSubject("", "gpt-x"), tokens),
        (LogSubject("", "gpt-x"), {"requests": 1, "input-tokens": 1, "output-tokens": 2, "tokens": 3, "usd_micros": 0}),
    ]


GOOD = '203.0.113.9 - - [10/Oct/2026:13:55:36 +0000] "GET /a HTTP/1.1" 200 1 "-" "-"\n'


def test_malformed_lines_are_counted_with_their_numbers(tmp_path):
    text = (
        GOOD
        + "garbage\n\n"
        + GOOD.replace("Oct", "Okt")
        + GOOD
        + GOOD.replace("GET /a HTTP/1.1", r"\x16\x03\x01")
        + GOOD.replace("10/", "32/")
        + GOOD
        + "the last line is cut"
    )
    rows, summary = read_text(tmp_path, text)
    assert (len(rows), summary.requests, summary.lines, summary.malformed) == (3, 3, 9, 5)
    assert [(each.line, each.reason[:20]) for each in summary.examples] == [
        (2, "does not follow the "),
        (4, "no month 'Okt'"),
        (6, "expected a request s"),
        (7, "day is out of range "),
        (9, "does not follow the "),
    ]


def test_control_characters_of_a_malformed_line_are_not_shown(tmp_path):
    _, summary = read_text(tmp_path, GOOD + "\x1b[2Jgarbage\n")
    assert summary.examples[0].excerpt == "?[2Jgarbage"


def test_records_that_are_no_objects_are_malformed(tmp_path):
    text = '{"ts": 1, "path": "/"}\n[1]\n{"ts": "x", "path": "/"}\n{"path": "/"}\n{"ts": 2, "path": "/b"}\n{"ts"'
    rows, summary = read_text(tmp_path, text)
    assert ([row[0] for row in rows], summary.malformed) == ([SECOND, 2 * SECOND], 4)
    assert [each.line for each in summary.examples] == [2, 3, 4, 6]


def test_files_are_merged_by_time_gzip_too(tmp_path):
    lines = [GOOD.replace(":36 ", f":{second:02} ").replace("/a", f"/{second}") for second in range(40)]
    (tmp_path / "a.log").write_text("".join(lines[::2]))
    (tmp_path / "b.log.gz").write_bytes(gzip.compress("".join(lines[1::2]).encode()))
    rows, summary = read([tmp_path / "a.log", tmp_path / "b.log.gz"])
    assert [row[2].path for row in rows] == [f"/{second}" for second in range(40)]
    assert summary.lines == 40


def test_standard_input_may_be_compressed(tmp_path):
    program = "from tests.plan.test_logs import read\nif __name__ == '__main__': print(len(read(['-'])[0]))"
    for data in (GOOD.encode() * 3, gzip.compress(GOOD.encode() * 3)):
        result = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=True)
        assert result.stdout == b"3\n"


def test_requests_are_ordered_by_their_arrival(tmp_path):
    text = "".join(
        f'{1791640500 + end:.3f} 203.0.113.9 "GET /{start} HTTP/1.1" {end - start:.3f}\n'
        for start, end in ((2.0, 2.5), (1.0, 3.0), (0.5, 4.0), (3.5, 4.0), (3.0, 4.5))
    )
    rows, summary = read_text(tmp_path, text, log_format='$msec $remote_addr "$request" $request_time')
    assert [row[2].path for row in rows] == ["/0.5", "/1.0", "/2.0", "/3.0", "/3.5"]
    assert (summary.steps, summary.late) == (0, 0)


def test_a_clock_that_steps_back_reorders_nothing(tmp_path):
    times = [100, 101, 102, 40, 41, 39, 103, 104]
    text = "".join(f'{1791640500 + at}.000 203.0.113.9 "GET /{i} HTTP/1.1" 0.000\n' for i, at in enumerate(times))
    rows, summary = read_text(tmp_path, text, log_format='$msec $remote_addr "$request" $request_time')
    assert [row[2].path for row in rows] == [f"/{i}" for i in range(8)]
    assert summary.steps == 1


def test_a_local_time_that_occurs_twice_is_read_as_it_rises():
    zone = ZoneInfo("Europe/Berlin")
    times = LocalTimes(zone)
    texts = ["2026-10-25 01:59:00", "2026-10-25 02:30:00", "2026-10-25 02:59:59", "2026-10-25 02:00:00",
             "2026-10-25 02:30:00", "2026-10-25 03:00:00"]  # fmt: skip
    found = [times.read(text) // 60_000_000 for text in texts]
    assert [after - before for before, after in pairwise(found)] == [31, 29, 1, 30, 30]


def test_zones_of_lines_may_differ(tmp_path):
    text = GOOD + GOOD.replace("13:55:36 +0000", "09:55:37 -0400") + GOOD.replace("13:55:36 +0000", "19:25:38 +0530")
    rows, _ = read_text(tmp_path, text)
    assert [(row[0] - AT + SECOND // 2) // SECOND for row in rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "expected", "resolution"),
    [
        ("1791640536", 1791640536 * SECOND, SECOND),
        ("1791640536.5", 1791640536 * SECOND + 500_000, 100_000),
        ("1791640536.123456789", 1791640536 * SECOND + 123_456, 1),
        ("1791640536123", 1791640536123_000, 1000),
        ("1791640536123456", 1791640536123456, 1),
        ("1791640536123456789", 1791640536123456, 1),
    ],
)
def test_numbers_since_1970_are_exact(text, expected, resolution):
    assert (read_epoch(text), resolution_of(text)) == (expected, resolution)


@pytest.mark.parametrize(
    "text", ["10/Oct/2026:13:55:36", "10/Oct/2026:13:55:36 +00000", "10/Foo/2026:13:55:36 +0000", ""]
)
def test_a_wrong_common_time_is_refused(text):
    with pytest.raises((ValueError, KeyError, IndexError)):
        read_common(text)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("what is this\nnobody knows\n", {}, "the format is not known: name it with --format"),
        (GOOD, {"log_format": "$remote_addr $status"}, "does not say of a request its time"),
        (GOOD, {"log_format": '$remote_addr [$msec] "$request"'}, "no line follows the format"),
        ('{"a": 1}\n', {}, "has no column with a time"),
        ('{"ts": "yesterday"}\n', {}, "expected a time such as 2026-10-10T13:55:36Z"),
        ('{"ts": 1, "p": "/"}\n', {"columns": {"paht": "p"}}, "did you mean 'path'"),
        ('{"ts": 1, "p": "/"}\n', {"columns": {"path": "q"}}, "the first record has no 'q'"),
        ('{"ts": 1, "d": 2}\n', {"columns": {"duration": "d", "duration_unit": "min"}}, "one of s, ms, us, ns"),
    ],
)  # fmt: skip
def test_a_log_that_cannot_be_read_says_what_would_be_right(text, options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_text(tmp_path, text, **options)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing.log: cannot be read: No such file"):
        read([tmp_path / "nothing.log"])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(GOOD.encode() * 1000)[:-20])
    with pytest.raises(ConfigError, match=r"cut.gz: cannot be read: Compressed file ended"):
        read([tmp_path / "cut.gz"])
    with pytest.raises(ConfigError, match="is a folder"):
        read([tmp_path])


def test_an_empty_log_has_no_requests(tmp_path):
    assert read_text(tmp_path, "")[0] == []
