"""Log lines: what is said, how often, and that nothing a client writes can forge one."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inbound.harness import WsgiDoor
from tidegate import Limiter
from tidegate.observe.logs import DecisionLog, shown
from tidegate.testing import ManualClock

ONE = {"categories": {"read": {"limit": 1}}}


@pytest.fixture(autouse=True)
def _everything(caplog):
    caplog.set_level(logging.INFO)


def lines(caplog):
    return [(record.levelname, record.message) for record in caplog.records]


def test_a_warning_per_exceeded_with_address_and_endpoint(door, caplog):
    api = door(ONE)
    api.ask()
    assert lines(caplog) == []  # checks are not logged unless asked for
    api.ask("/api/feed/7", "POST")
    assert lines(caplog) == [
        ("WARNING", "rate limit exceeded: read: 203.0.113.9, retry in 60 s: POST /api/feed/7"),
    ]
    assert caplog.records[0].name == "tidegate.inbound"


def test_checks_are_sampled(door, caplog):
    api = door(log_every=10)
    api.many(30)
    assert lines(caplog)[0] == ("INFO", "read: 203.0.113.9 allowed, 50 of 60 left: GET /api/feeds")
    assert len(lines(caplog)) == 3


def test_a_flood_of_denials_is_no_flood_of_lines(door, caplog):
    api = door(ONE, log_burst=3)
    api.many(11)
    assert len(lines(caplog)) == 3
    api.clock.advance(1)
    api.ask()
    assert lines(caplog)[-1][1].endswith("GET /api/feeds (7 more were not logged)")


def test_observers_are_told_what_no_log_wants(door, caplog):
    caplog.set_level(logging.ERROR, "tidegate.inbound")
    told = []
    door(ONE, observer=told.append).many(3)
    assert [(record.decision.allowed, record.subject) for record in told] == [
        (True, "GET /api/feeds"),
        (False, "GET /api/feeds"),
        (False, "GET /api/feeds"),
    ]
    assert lines(caplog) == []


def test_no_lines_at_all(door, caplog):
    door(ONE, log_burst=0).many(5)
    assert lines(caplog) == []


@pytest.mark.parametrize(
    "path",
    [
        "/a\nWARNING forged: all is well",
        "/a\r\nb",
        "/\x1b[2J\x1b[31mred",
        "/\x00",
        "/\x7f",
        "/\u2028new line",
        "/\u202egnp.exe",
        "/\ud800",
        "/" + "x" * 70_000,
    ],
)
def test_control_characters_never_reach_the_log(path, caplog):
    api = WsgiDoor(ONE)
    api.ask()
    api.ask(path)
    ((_, line),) = lines(caplog)
    assert line.isprintable()
    assert len(line) < 300


@given(st.text())
def test_whatever_is_shown_is_printable_and_short(text):
    assert shown(text).isprintable()
    assert len(shown(text)) <= 201 * 10


def test_keys_of_clients_are_escaped_too(door, caplog):
    api = door(ONE, key=lambda request: "evil\nname")
    api.many(2)
    assert r"key/evil\nname" in lines(caplog)[0][1]


def test_the_log_is_an_observer_for_any_limiter(caplog):
    limiter = Limiter("1/1m", clock=ManualClock(), observer=DecisionLog("mine", every=1))
    limiter.try_acquire("a")
    limiter.try_acquire("a")
    limiter.peek("a")
    limiter.try_acquire("a", 2)
    assert lines(caplog) == [
        ("INFO", "default: a allowed, 0 of 1 left"),
        ("WARNING", "rate limit exceeded: default: a, retry in 60 s"),
        ("WARNING", "rate limit exceeded: default: a, never allowed"),
    ]
    assert caplog.records[0].name == "mine"
    limiter.close()
