"""Suggested limits: what each client needed of an algorithm, and a suggestion that holds when it is replayed."""

import tempfile
from pathlib import Path

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.drivers import LOG_FORMAT, START, Call, write_log
from tidegate._cli import main
from tidegate.core import Limit
from tidegate.core._decision import acquire
from tidegate.errors import ConfigError, Denied
from tidegate.outbound import Providers, request_options
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.plan import ReplayOptions, SuggestOptions, read_spec, replay, suggest, to_yaml
from tidegate.plan._logs.formats import LogOptions
from tidegate.plan._measure import make_measure, measured_limit
from tidegate.plan._suggest import choose_quota, round_up
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

OPTIONS = ReplayOptions(LogOptions(log_format=LOG_FORMAT))
GAPS = st.lists(
    st.tuples(st.sampled_from([0, 1, 999, 100_000, 250_000, 999_999, 1_000_000, 1_500_000]), st.integers(1, 3)),
    min_size=1,
    max_size=30,
)


def denies(quota, period, algorithm, requests):
    limit, state = Limit(quota, period, algorithm=algorithm), None
    for now, cost in requests:
        allowed, (state,), _ = acquire((limit,), (state,), (cost,), now)
        if not allowed:
            return True
    return False


@given(GAPS, st.sampled_from(["sliding_log", "fixed_window", "token_bucket", "sliding_window"]))
def test_the_quota_that_a_client_needed_is_the_smallest_that_denies_nothing(gaps, algorithm):
    requests, now = [], 1_790_000_000_000_000
    for gap, cost in gaps:
        now += gap
        requests.append((now, cost))
    measure = make_measure(measured_limit("1s", algorithm))
    for at, cost in requests:
        measure.add(at, cost)
    assert not denies(measure.needed, "1s", algorithm, requests)
    assert measure.needed == 1 or denies(measure.needed - 1, "1s", algorithm, requests)


def test_quotas_are_rounded_up_to_numbers_that_people_choose():
    assert [round_up(each) for each in (0, 1, 7, 9, 11, 61, 81, 101)] == [1, 1, 8, 10, 12, 80, 100, 120]
    needs = list(range(1, 101))
    assert [choose_quota(needs, share) for share in (0, 0.01, 0.5)] == [100, 100, 50]


@pytest.fixture
def log(tmp_path):
    made = []
    for client in range(20):
        made += [Call(at * 10_000 + client, peer=f"203.0.113.{client}", target="/items") for at in range(30)]
    made += [Call(at * 100, peer="198.51.100.1", target="/items") for at in range(2000)]
    made += [Call(at * 50_000, peer="203.0.113.1", target=f"/users/{at}", method="POST") for at in range(5)]
    return write_log(tmp_path / "access.log", made)


def test_a_suggestion_holds_when_it_is_replayed(log):
    wanted = SuggestOptions(periods=("1m", "1h"), max_clients=0.05, max_requests=0.9)
    report = suggest([log], wanted, options=OPTIONS)
    items, users = report["groups"]
    assert (items["category"], users["category"]) == ("get-items", "post-users-id")
    minute, hour = items["periods"]
    assert (minute["quantiles"]["50"], minute["quantiles"]["100"], minute["suggested"]) == (6, 600, 6)
    assert (minute["clients_over"], items["heavy"], hour["suggested"]) == (1, ["198.51.100.1"], None)
    assert minute["tradeoff"][0] == (1, 1.0)
    assert minute["tradeoff"][-1][1] == 0.0
    assert report["denied"]["clients"] == 1
    assert report["goal"]["missed"] == []


def test_requests_that_may_be_denied_raise_a_limit(log):
    report = suggest([log], SuggestOptions(periods=("1m",), max_clients=0.05, max_requests=0.01), options=OPTIONS)
    assert report["groups"][0]["periods"][0]["suggested"] == 600
    assert report["denied"] == {"requests": 0, "clients": 0}


def test_clients_that_are_left_out_are_not_measured(log):
    wanted = SuggestOptions(periods=("1m",), max_clients=0, max_requests=0, left_out=("198.51.100.1",))
    report = suggest([log], wanted, options=OPTIONS)
    assert report["groups"][0]["periods"][0]["suggested"] == 6
    assert (report["left_out"]["requests"], report["denied"]["requests"]) == (2000, 0)


@pytest.mark.parametrize("algorithm", ["sliding_log", "token_bucket"])
def test_the_yaml_is_a_configuration_that_denies_as_it_says(algorithm, log, tmp_path, capsys):
    arguments = ["--log-format", LOG_FORMAT, "--algorithm", algorithm, "--period", "1m", "--max-clients", "5%"]
    assert main(["plan", "suggest", "--log", str(log), *arguments, "--max-requests", "90%"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(text)
    assert main(["validate", str(tmp_path / "config.yaml")]) == 0
    denied = replay([log], read_spec([tmp_path / "config.yaml"]), OPTIONS)["totals"]["denied"]
    assert f"Replayed: {denied:,} requests of 1 clients denied" in text
    assert yaml.safe_load(text)["rate_limiting"]["algorithm"] == algorithm


def test_categories_of_a_file_get_limits(log, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "rate_limiting: {categories: {all: {limits: [1/1m], endpoints: [/items, '/users/*']}}}"
    )
    report = suggest([log], SuggestOptions(periods=("1m",)), read_spec([tmp_path / "config.yaml"]), OPTIONS)
    (group,) = report["groups"]
    assert (group["category"], group["endpoints"]) == ("all", ["* /items", "* /users/*"])


CALLS = st.lists(
    st.tuples(st.sampled_from([0, 1, 100, 400, 1000, 3000]), st.sampled_from(["/a", "/big"])), min_size=1, max_size=25
)


def sent_in_time(made, limits, wait):
    """Return whether a transport sends all calls in time, one after the other."""
    clock = ManualClock(START / 1000)
    providers = Providers.of(PROVIDER | {"limits": limits})
    transport = RateLimitTransport(
        providers, MemoryStore(clock=clock), httpx.MockTransport(lambda _request: httpx.Response(200))
    )
    with httpx.Client(transport=transport) as client:
        for call in made:
            late = clock.steady() // 1000 - START - call.at
            clock.advance(max(0, -late) / 1000)
            try:
                with request_options(timeout=max(0, wait - max(0, late) / 1000)):
                    client.get(call.target)
            except Denied:
                return False
    return True


PROVIDER = {"domain": "x.example", "endpoints": [{"path": "/big", "cost": 2}]}


@given(CALLS, st.sampled_from([0, 1, 2.5]), st.sampled_from(["sliding_log", "token_bucket"]))
def test_the_suggested_quota_of_a_provider_is_the_smallest_with_which_a_transport_sends_in_time(asked, wait, algorithm):
    made, at = [], 0
    for gap, path in asked:
        at += gap
        made.append(Call(at, target=f"https://x.example{path}"))
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder, "sent.jsonl"), Path(folder, "provider.yaml")
        log.write_text("".join(f'{{"ts": {START + call.at}, "url": "{call.target}"}}\n' for call in made))
        file.write_text(yaml.safe_dump(PROVIDER | {"limits": [f"30/1s {algorithm}"]}))
        report = suggest([log], SuggestOptions(wait=round(wait * 1e6)), read_spec([file], "provider"))
    (suggested,) = yaml.safe_load(to_yaml(report))["limits"]
    assert sent_in_time(made, [suggested], wait)
    smaller = suggested | {"limit": suggested["limit"] - 1}
    assert suggested["limit"] <= 2 or not sent_in_time(made, [smaller], wait)


def test_limits_of_a_provider_serve_together(tmp_path, capsys):
    made = [Call(at * 100, target="https://x.example/a") for at in range(60)]
    (tmp_path / "sent.jsonl").write_text(
        "".join(f'{{"ts": {START + call.at}, "url": "{call.target}"}}\n' for call in made)
    )
    (tmp_path / "provider.yaml").write_text("domain: x.example\nlimits: [3/1s, 100/1m]\nconcurrency: 4\n")
    arguments = ["--log", str(tmp_path / "sent.jsonl"), "--policy", str(tmp_path / "provider.yaml")]
    assert main(["plan", "suggest", *arguments, "--wait", "2s"]) == 0
    text = capsys.readouterr().out
    assert "# Not measured, keep it: 4/2m concurrency" in text
    suggested = yaml.safe_load(text)["limits"]
    assert [each["limit"] for each in suggested] == [8, 60], text
    assert sent_in_time(made, suggested, 2)
    assert not sent_in_time(made, ["3/1s", "100/1m"], 2)
    (tmp_path / "provider.yaml").write_text("domain: x.example\nlimits: [3/1s]\nper: host\n")
    with pytest.raises(ConfigError, match="has several quotas"):
        suggest([tmp_path / "sent.jsonl"], None, read_spec([tmp_path / "provider.yaml"], "provider"))


def test_standard_input_cannot_be_read_twice():
    with pytest.raises(ConfigError, match="cannot be read from standard input"):
        suggest(["-"])
