"""Log lines: their content, their rate, and that client input cannot forge them."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inbound.harness import START, AsgiHarness, WsgiHarness
from tidegate import ConfigError, Limiter, Policy
from tidegate.observe import Record
from tidegate.observe.logs import DecisionLog, shown
from tidegate.testing import ManualClock

ONE = {"categories": {"read": {"limit": 1}}}


@pytest.fixture(autouse=True)
def _everything(caplog):
    caplog.set_level(logging.INFO)


def lines(caplog):
    """Return the log lines about requests: all but those about the start and the cleanup."""
    return [
        pair for pair in all_lines(caplog) if not pair[1].startswith(("rate limiter initialized", "rate limit clean"))
    ]


def all_lines(caplog):
    return [(record.levelname, record.message) for record in caplog.records]


def test_the_start_is_logged(make_app, caplog):
    make_app(ONE)
    named = "read (1/1m), expensive (5/1h), moderately (10/1h), very_expensive (3/1h)"
    defaulted = "expensive, moderately, very_expensive"
    line = f"rate limiter initialized: categories {named}; with their default limits: {defaulted}"
    assert all_lines(caplog) == [("INFO", line)]


def test_disabled_limits_are_logged_at_the_start(make_app, caplog):
    make_app({"enabled": False, **ONE})
    assert ("WARNING", "rate limiter disabled: `enabled` is false, so no request is limited") in all_lines(caplog)


def test_a_limit_of_zero_is_logged_at_the_start(make_app, caplog):
    make_app({"categories": {"read": {"limit": 0}}})
    warnings = [line for level, line in all_lines(caplog) if level == "WARNING"]
    assert warnings == ["the limit of category read is 0: all of its requests are denied"]


def test_without_a_config_the_defaults_apply_and_are_logged_once(make_app, caplog, tmp_path, monkeypatch):
    """A file is an error only if it is named."""
    monkeypatch.chdir(tmp_path)
    api = make_app()
    assert api.statuses(61).count(200) == 60
    (line,) = [line for line in all_lines(caplog) if "initialized" in line[1]]
    text = "rate limiter initialized with the default limits, because it has no config: categories "
    assert line == ("INFO", f"{text}expensive (5/1h), moderately (10/1h), read (60/1m), very_expensive (3/1h)")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        make_app("config.yaml")


def test_each_cleanup_is_logged_with_the_number_of_active_entries(make_app, caplog):
    api = make_app({"cleanup_interval_minutes": 2, "categories": {"read": {"limit": 5, "window_minutes": 60}}})
    for number in range(3):
        api.request(peer=f"203.0.113.{number}")
    for _ in range(7):
        api.clock.advance(60)
        api.request(peer="203.0.113.1")
    cleanups = [line for line in all_lines(caplog) if "cleanup" in line[1]]
    assert cleanups == [("INFO", "rate limit cleanup: 3 active entries")] * 3


def test_a_denial_logs_a_warning_with_address_and_endpoint(make_app, caplog):
    api = make_app(ONE)
    api.request()
    assert lines(caplog) == []  # checks are not logged by default
    api.request("/api/feed/7", "POST")
    assert lines(caplog) == [
        ("WARNING", "rate limit exceeded: read: 203.0.113.9, retry in 60 s: POST /api/feed/7"),
    ]
    assert caplog.records[0].name == "tidegate.inbound"


def test_checks_are_sampled(make_app, caplog):
    api = make_app(log_every=10)
    api.statuses(30)
    assert lines(caplog)[0] == ("INFO", "read: 203.0.113.9 allowed, 50 of 60 left: GET /api/feeds")
    assert len(lines(caplog)) == 3


MORE = "rate limit exceeded: read: {} more denials within one second"


def test_denials_beyond_ten_per_second_are_counted(make_app, caplog):
    api = make_app(ONE)
    api.statuses(301)
    assert len(lines(caplog)) == 10
    api.clock.advance(1)
    api.request()
    written = [message for _, message in lines(caplog)[10:]]
    assert written == [MORE.format(290), "rate limit exceeded: read: 203.0.113.9, retry in 59 s: GET /api/feeds"]


def test_every_denial_of_45_seconds_is_logged_or_counted(make_app, caplog):
    api = make_app(ONE)
    for _ in range(45):
        api.statuses(69)
        api.clock.advance(1)
    api.request()
    assert len(lines(caplog)) <= 45 * 11 + 1
    counted = sum(int(message.split()[4]) for _, message in lines(caplog) if "more denials" in message)
    alone = sum("203.0.113.9" in message for _, message in lines(caplog))
    assert counted + alone == 45 * 69  # all denials; the first request was allowed, the last denied


def test_each_policy_has_its_own_ten_lines(make_app, caplog):
    api = make_app({"categories": {"read": {"limit": 1}, "expensive": {"limit": 1}}})
    api.statuses(21)
    api.statuses(21, "/api/cluster")
    assert [sum(name in message for _, message in lines(caplog)) for name in ("read", "expensive")] == [10, 10]


def test_an_allowed_request_also_logs_the_pending_count(make_app, caplog):
    api = make_app(ONE)
    api.statuses(31)
    api.clock.advance(2)
    assert api.request(peer="198.51.100.7").status == 200
    assert lines(caplog)[10:] == [("WARNING", MORE.format(20))]


@pytest.mark.parametrize("kind", [AsgiHarness, WsgiHarness], ids=["asgi", "wsgi"])
def test_closing_logs_the_pending_count(kind, caplog):
    api = kind(ONE)
    api.statuses(31)
    api.close()
    assert lines(caplog)[10:] == [("WARNING", MORE.format(20))]


def test_log_burst_sets_the_number_of_lines(make_app, caplog):
    api = make_app(ONE, log_burst=3)
    api.statuses(11)
    assert len(lines(caplog)) == 3


def test_threads_lose_no_denial(caplog):
    decision_log = DecisionLog("mine")
    limiter = Limiter("1/1m", clock=ManualClock(start=START), observer=decision_log)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [limiter.try_acquire("a") for _ in range(100)], range(8)))
    decision_log.flush()
    assert lines(caplog)[10:] == [("WARNING", "rate limit exceeded: default: 789 more denials within one second")]
    limiter.close()


def test_a_clock_that_steps_back_does_not_silence_the_log(make_app, caplog):
    api = make_app(ONE)
    api.statuses(31)
    api.clock.advance(-5)
    api.request()
    assert next(message for _, message in lines(caplog)[10:]) == MORE.format(20)
    assert len(lines(caplog)) == 12


def test_policies_beyond_the_maximum_share_a_count(caplog):
    decision_log = DecisionLog("mine")
    with Limiter("1/1m", clock=ManualClock(start=START)) as limiter:
        denied = limiter.try_acquire("a", 2)
    for number in range(1100):
        decision_log(Record("acquire", Policy(f"policy {number}", denied[2]), "a", (2,), denied))
    decision_log.flush()
    assert len(lines(caplog)) == 1000 + 10 + 1
    assert lines(caplog)[-1][1] == "rate limit exceeded: other policies: 90 more denials within one second"


NETWORKS = [
    ("2001:db8:1:2::9", "2001:db8:1:2::/64", {}),
    ("203.0.113.9", "203.0.113.0/24", {"ipv4_prefix": 24}),
]


@pytest.mark.parametrize(("peer", "key", "options"), NETWORKS, ids=["IPv6", "IPv4 network"])
def test_addresses_are_logged_as_the_admin_endpoint_shows_them(make_app, caplog, peer, key, options):
    token = "0123456789abcdef"  # noqa: S105 - of this test
    api = make_app(ONE, admin_token=token, log_every=1, **options)
    stats = "/api/admin/rate-limit-stats"
    for _ in range(2):
        api.request(peer=peer)
    api.request(stats, peer=peer)
    bearer = [("Authorization", f"Bearer {token}")]
    body = json.dumps({"action": "reset", "key": peer}).encode()
    api.request(stats, "POST", bearer, body=body, peer="127.0.0.1")
    api.request(peer=peer)
    shown_there = json.loads(api.request(f"{stats}?top=1", headers=bearer).body)
    assert shown_there["near_limit"][0]["key"] == key
    texts = [line for _, line in lines(caplog)]
    assert [line.partition(f" {key}")[1] for line in texts] == [f" {key}"] * 5
    assert not [line for line in texts if f"{peer} " in line]


def test_errors_that_any_client_can_cause_are_counted(make_app, caplog):
    api = make_app()
    api.statuses(13, "/api/admin/rate-limit-stats")
    api.clock.advance(1)
    api.request("/api/admin/rate-limit-stats")
    assert lines(caplog)[10:] == [
        ("WARNING", "admin request denied for …: 3 more within one second"),
        ("WARNING", "admin request denied for 203.0.113.9"),
    ]


def test_observers_are_called_if_the_log_level_is_disabled(make_app, caplog):
    caplog.set_level(logging.ERROR, "tidegate.inbound")
    records = []
    make_app(ONE, observer=records.append).statuses(3)
    assert [(record.decision.allowed, record.subject) for record in records] == [
        (True, "GET /api/feeds"),
        (False, "GET /api/feeds"),
        (False, "GET /api/feeds"),
    ]
    assert lines(caplog) == []


def test_log_burst_0_disables_denial_lines(make_app, caplog):
    make_app(ONE, log_burst=0).statuses(5)
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
    api = WsgiHarness(ONE)
    api.request()
    api.request(path)
    ((_, line),) = lines(caplog)
    assert line.isprintable()
    assert len(line) < 300


@given(st.text())
def test_escaped_text_is_printable_and_short(text):
    assert shown(text).isprintable()
    assert len(shown(text)) <= 201 * 10


def test_custom_keys_are_escaped(make_app, caplog):
    api = make_app(ONE, key=lambda request: "evil\nname")
    api.statuses(2)
    assert r"key/evil\nname" in lines(caplog)[0][1]


def test_the_log_works_as_observer_of_any_limiter(caplog):
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
