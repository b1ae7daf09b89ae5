"""Log lines: what is said, how often, and that nothing a client writes can forge one."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inbound.harness import START, AsgiDoor, WsgiDoor
from tidegate import Limiter, Policy
from tidegate.observe import Record
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


MORE = "rate limit exceeded: read: {} more denials within one second"


def test_beyond_ten_a_second_denials_are_counted(door, caplog):
    api = door(ONE)
    api.many(301)
    assert len(lines(caplog)) == 10
    api.clock.advance(1)
    api.ask()
    written = [message for _, message in lines(caplog)[10:]]
    assert written == [MORE.format(290), "rate limit exceeded: read: 203.0.113.9, retry in 59 s: GET /api/feeds"]


def test_45_seconds_of_denials(door, caplog):
    api = door(ONE)
    for _ in range(45):
        api.many(69)
        api.clock.advance(1)
    api.ask()
    assert len(lines(caplog)) <= 45 * 11 + 1
    counted = sum(int(message.split()[4]) for _, message in lines(caplog) if "more denials" in message)
    alone = sum("203.0.113.9" in message for _, message in lines(caplog))
    assert counted + alone == 45 * 69  # every denial is told of; the first request was allowed, the last denied


def test_each_policy_has_ten_lines_of_its_own(door, caplog):
    api = door({"categories": {"read": {"limit": 1}, "expensive": {"limit": 1}}})
    api.many(21)
    api.many(21, "/api/cluster")
    assert [sum(name in message for _, message in lines(caplog)) for name in ("read", "expensive")] == [10, 10]


def test_the_count_is_told_by_the_next_request_that_is_allowed_too(door, caplog):
    api = door(ONE)
    api.many(31)
    api.clock.advance(2)
    assert api.ask(peer="198.51.100.7").status == 200
    assert lines(caplog)[10:] == [("WARNING", MORE.format(20))]


@pytest.mark.parametrize("kind", [AsgiDoor, WsgiDoor], ids=["asgi", "wsgi"])
def test_the_count_is_told_at_the_end_at_the_latest(kind, caplog):
    api = kind(ONE)
    api.many(31)
    api.close()
    assert lines(caplog)[10:] == [("WARNING", MORE.format(20))]


def test_a_number_of_ones_own(door, caplog):
    api = door(ONE, log_burst=3)
    api.many(11)
    assert len(lines(caplog)) == 3


def test_threads_lose_no_denial(caplog):
    told = DecisionLog("mine")
    limiter = Limiter("1/1m", clock=ManualClock(start=START), observer=told)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [limiter.try_acquire("a") for _ in range(100)], range(8)))
    told.flush()
    assert lines(caplog)[10:] == [("WARNING", "rate limit exceeded: default: 789 more denials within one second")]
    limiter.close()


def test_a_clock_that_steps_back_does_not_silence_the_log(door, caplog):
    api = door(ONE)
    api.many(31)
    api.clock.advance(-5)
    api.ask()
    assert next(message for _, message in lines(caplog)[10:]) == MORE.format(20)
    assert len(lines(caplog)) == 12


def test_policies_without_number_share_a_count(caplog):
    told = DecisionLog("mine")
    with Limiter("1/1m", clock=ManualClock(start=START)) as limiter:
        denied = limiter.try_acquire("a", 2)
    for number in range(1100):
        told(Record("acquire", Policy(f"policy {number}", denied[2]), "a", (2,), denied))
    told.flush()
    assert len(lines(caplog)) == 1000 + 10 + 1
    assert lines(caplog)[-1][1] == "rate limit exceeded: other policies: 90 more denials within one second"


def test_errors_that_anybody_can_bring_about_are_counted_too(door, caplog):
    api = door()
    api.many(13, "/api/admin/rate-limit-stats")
    api.clock.advance(1)
    api.ask("/api/admin/rate-limit-stats")
    assert lines(caplog)[10:] == [
        ("WARNING", "refused the operator's page to …: 3 more within one second"),
        ("WARNING", "refused the operator's page to 203.0.113.9"),
    ]


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
