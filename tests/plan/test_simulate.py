"""Simulated traffic: the same calls for each rule, decided by the engine; what an oracle counts in the outcomes."""

import json
import re
from itertools import pairwise
from xml.dom import minidom

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import ConfigError, Limit
from tidegate._cli import main
from tidegate.plan import SimulateOptions, compare_algorithms, simulate
from tidegate.plan._traffic import FIELDS, Traffic

SECOND = 1_000_000
TRAFFIC = [
    "poisson rate=3/1s clients=4",
    "bursts size=40 every=30s clients=3",
    "day rate=2/1s",
    "herd size=50 outage=1m",
]
EXACT = "sliding_log"
WINDOW = {"a": ["10/1m fixed_window"]}


@cases("text", TRAFFIC)
def test_the_same_seed_makes_the_same_calls_in_order(text):
    first, again, other = ([*Traffic.parse(text).arrivals(300 * SECOND, seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert all(a.at <= b.at for a, b in pairwise(first))
    assert first[-1].at < 300 * SECOND
    assert {each.client for each in first} <= {*range(10)}


def test_poisson_calls_arrive_at_their_rate():
    calls = [*Traffic.parse("poisson rate=20/1s").arrivals(1000 * SECOND, 1)]
    assert len(calls) == pytest.approx(20_000, rel=0.03)


def test_a_day_is_quiet_at_night():
    hour = 3600 * SECOND
    times = [each.at for each in Traffic.parse("day rate=1/1s low=10%").arrivals(24 * hour, 1)]
    night, noon = (sum(start <= at < start + hour for at in times) for start in (0, 12 * hour))
    assert night == pytest.approx(0.1 * noon, rel=0.25)


def test_a_herd_comes_when_the_outage_ends():
    times = [each.at for each in Traffic.parse("herd size=300 outage=2m rate=1/1s").arrivals(300 * SECOND, 1)]
    assert min(times) >= 120 * SECOND
    assert sum(at < 121 * SECOND for at in times) >= 300


def test_one_client_makes_all_calls():
    assert {each.client for each in Traffic.parse("poisson clients=1 busiest=50%").arrivals(10 * SECOND, 1)} == {0}


def test_the_busiest_client_has_its_share():
    calls = [*Traffic.parse("poisson rate=50/1s clients=10 busiest=80%").arrivals(100 * SECOND, 1)]
    assert sum(not each.client for each in calls) == pytest.approx(0.8 * len(calls), rel=0.03)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison rate=1/1s", "did you mean 'poisson'"),
        ("", "unknown traffic ''"),
        ("poisson rates=1/1s", "did you mean 'rate'"),
        ("poisson rate=often", "rate: expected calls per period"),
        ("poisson rate=0/1s", "rate: expected calls per period"),
        ("poisson clients=0", "clients: expected a positive integer"),
        ("bursts every=never", "every: expected a period"),
        ("poisson rate=1000000/1s", "more than 5,000,000 calls"),
    ],
)
def test_wrong_traffic_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        simulate({"a": ["1/1s"]}, [text])


@given(
    quota=st.integers(1, 12),
    period=st.sampled_from(["1s", "10s", "1m"]),
    traffic=st.lists(st.sampled_from(TRAFFIC), min_size=1, max_size=2),
    retries=st.integers(0, 2),
    wait=st.sampled_from([0, 0, 5 * SECOND]),
    obedient=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 5),
)
@settings(max_examples=30, deadline=None)
def test_every_call_is_admitted_or_denied_once_and_an_exact_limit_is_never_exceeded(
    quota, period, traffic, retries, wait, obedient, seed
):
    options = SimulateOptions(120 * SECOND, seed, 0 if wait else retries, obedient, wait)
    report = simulate(compare_algorithms(f"{quota}/{period}"), traffic, options)
    assert report == simulate(compare_algorithms(f"{quota}/{period}"), traffic, options)
    for rule in report["rules"]:
        assert rule["admitted"] + rule["denied"] == rule["calls"] == sum(report["offered"])
        assert sum(rule["timeline"]["admitted"]) == rule["admitted"]
        assert rule["attempts"] >= rule["admitted"]
        (burst,) = rule["bursts"]
        assert burst["worst"] <= (quota if EXACT in rule["rule"] else 2 * quota + 1)
        assert (rule["waits"]["longest"] or 0) <= max(wait / SECOND, 0 if not retries else 120)


def test_waiting_callers_are_served_in_order_and_at_once_when_a_permit_is_due():
    report = simulate(
        {"a": ["1/1s sliding_log"]},
        ["bursts size=10 every=1m clients=1"],
        SimulateOptions(60 * SECOND, wait=6 * SECOND),
    )
    (rule,) = report["rules"]
    assert (rule["admitted"], rule["denied"]) == (6, 4) or (rule["admitted"], rule["denied"]) == (7, 3)
    assert rule["waits"]["longest"] <= 6.0


def test_clients_that_ignore_retry_after_make_many_more_attempts():
    runs = [
        simulate(WINDOW, ["poisson rate=1/1s clients=1"], SimulateOptions(600 * SECOND, retries=20, obedient=part))
        for part in (0.0, 1.0)
    ]
    disobedient, obedient = (run["rules"][0] for run in runs)
    assert disobedient["admitted"] == pytest.approx(obedient["admitted"], rel=0.1)
    assert disobedient["attempts"] > 1.5 * obedient["attempts"]


def test_a_hidden_limit_refuses_what_the_own_limits_admit():
    traffic = ["poisson rate=10/1s clients=5"]
    hidden = SimulateOptions(100 * SECOND, hidden=Limit.parse("20/1s sliding_log"))
    low, high = simulate({"low": ["3/1s sliding_log"], "high": ["20/1s"]}, [*traffic, *traffic, *traffic], hidden)[
        "rules"
    ]
    assert low["refused"] == 0 < high["refused"] <= high["admitted"]


def test_a_limit_without_an_algorithm_is_compared_with_each():
    assert list(compare_algorithms("5/1m")) == [
        "5/1m token_bucket", "5/1m fixed_window", "5/1m sliding_window", "5/1m sliding_log",
    ]  # fmt: skip
    assert list(compare_algorithms("5/1m sliding_log")) == ["5/1m sliding_log"]
    assert list(compare_algorithms("5/day")) == ["5/day calendar_window"]


def test_slots_are_refused():
    with pytest.raises(ConfigError, match="no durations"):
        simulate({"a": ["5/1m concurrency"]}, ["poisson"])


def test_the_report_is_plain_data():
    report = simulate({"a": ["5/1m", "100/1h"]}, ["poisson"])
    assert json.loads(json.dumps(report)) == report


def test_each_kind_has_defaults():
    for kind in FIELDS:
        assert [*Traffic.parse(kind).arrivals(1200 * SECOND, 1)]


def test_the_command_compares_algorithms(capsys):
    arguments = ["--traffic", "bursts size=20 every=30s clients=1", "--duration", "5m", "--seed", "3"]
    assert main(["plan", "simulate", "10/1m", *arguments, "--json"]) == 0
    rules = {rule["rule"]: rule for rule in json.loads(capsys.readouterr().out)["rules"]}
    assert rules["10/1m fixed_window"]["bursts"][0]["worst"] <= 20
    assert rules["10/1m sliding_log"]["bursts"][0]["worst"] == 10
    assert main(["plan", "simulate", "10/1m", *arguments]) == 0
    text = capsys.readouterr().out
    assert "worst burst" in text
    assert "seed 3" in text


def test_the_command_simulates_the_policies_of_a_service(tmp_path, capsys):
    file = tmp_path / "service.yaml"
    file.write_text("policies:\n  a: 5/1m\n  b: {limits: [10/1s, 60/1m]}\n", encoding="utf-8")
    assert main(["plan", "simulate", str(file), "2/1s,30/1m", "--traffic", "poisson rate=1/1s", "--json"]) == 0
    assert [rule["rule"] for rule in json.loads(capsys.readouterr().out)["rules"]] == ["a", "b", "2/1s, 30/1m"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["10/1m"], "--traffic"),
        (["--traffic", "poisson"], "expected rules"),
        (["10/1x", "--traffic", "poisson"], "10/1x"),
        (["10/1m", "--traffic", "poisson", "--policy", "a=1/1m"], "--policy: is an option of"),
        (["10/1m", "--traffic", "poisson", "--hidden", "often"], "--hidden"),
    ],
)
def test_a_wrong_command_says_what_is_expected(arguments, message, capsys):
    assert main(["plan", "simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_pages_and_pictures_of_every_report_load_nothing_and_show_no_markup_of_a_log(tmp_path, capsys):
    log = tmp_path / "access.log"
    line = '203.0.113.{} - - [10/Oct/2026:13:{:02}:00 +0000] "GET /<script>alert(1)</script>{} HTTP/1.1" 200 5\n'
    log.write_text("".join(line.format(n % 5, n, n % 2) for n in range(60)), encoding="utf-8")
    plain = tmp_path / "plain.log"
    plain.write_text("".join(line.format(n % 5, n, 0) for n in range(60)).replace("<script>alert(1)</script>", "items"))
    reports = {
        "replay": [str(log), "--policy", "api=3/1h sliding_log"],
        "diff": ["api=9/1h", "api=3/1h", "--log", str(log)],
        "suggest": [str(plain), "--period", "10m"],
        "simulate": ["5/1m", "--traffic", "poisson rate=1/1s"],
    }
    for action, arguments in reports.items():
        page, picture = tmp_path / f"{action}.html", tmp_path / f"{action}.svg"
        assert main(["plan", action, *arguments, "--html", str(page), "--svg", str(picture)]) == 0
        text = page.read_text(encoding="utf-8")
        assert "<script>" not in text
        assert text.count("<svg") > 0
        assert not re.search(r"(src|href)=|@import|url\(", text)
        assert minidom.parse(str(picture)).documentElement.tagName == "svg"  # noqa: S318 - written above
    assert "&lt;script&gt;" in (tmp_path / "replay.html").read_text(encoding="utf-8")
    assert "would have been denied" in (tmp_path / "replay.html").read_text(encoding="utf-8")
    capsys.readouterr()


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    arguments = ["5/1m", "--traffic", "poisson", "--html", str(tmp_path / "missing" / "a.html")]
    assert main(["plan", "simulate", *arguments]) == 2
    assert "cannot be written" in capsys.readouterr().err
