"""A replay decides what the middleware, the service and the transport decided about the same requests."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.drivers import (
    LOG_FORMAT,
    START,
    Call,
    drive_asgi,
    drive_service,
    drive_transport,
    drive_wsgi,
    replay_outcomes,
    write_log,
)
from tidegate.budget import TaskBudget
from tidegate.outbound import Providers
from tidegate.plan._clock import ReplayClock
from tidegate.plan._logs.formats import LogOptions
from tidegate.plan._rules.budget import BudgetRules
from tidegate.plan._rules.inbound import InboundRules
from tidegate.plan._rules.outbound import OutboundRules
from tidegate.plan._rules.service import ServiceRules
from tidegate.service._config.settings import load_settings
from tidegate.testing import ManualClock

OPTIONS = LogOptions(log_format=LOG_FORMAT)
RATES = st.sampled_from(["2/1s", "3/2s", "5/10s", "4/1m", "2/500ms"])
ALGORITHMS = st.sampled_from(["", " token_bucket", " fixed_window", " sliding_log", " sliding_window"])
LIMITS = st.lists(st.builds("{}{}".format, RATES, ALGORITHMS), min_size=1, max_size=2, unique_by=lambda text: text[:4])
PEERS = st.sampled_from(["203.0.113.1", "203.0.113.2", "2001:db8::1", "2001:db8::2", "10.0.0.1"])
TARGETS = st.sampled_from(["/a", "/a/x?y=1", "/b", "/%62", "/big", "/c", "/other", "//a", "/A"])
NO_TIME = st.just(0)
GAPS = st.lists(st.sampled_from([0, 0, 1, 3, 100, 333, 500, 999, 1000, 1001, 2500, 60_000]), min_size=1, max_size=40)


@st.composite
def calls(draw, took=NO_TIME):
    found, at = [], 0
    for gap in draw(GAPS):
        at += gap
        found.append(
            Call(
                at,
                draw(took),
                draw(PEERS),
                draw(st.sampled_from(["GET", "POST"])),
                draw(TARGETS),
                draw(st.sampled_from([200, 200, 401, 404, 500])),
                draw(st.sampled_from(["-", "198.51.100.7", "198.51.100.8, 10.0.0.9", "unknown"])),
            )
        )
    return found


@st.composite
def categories(draw):
    found = {
        "a": {"limits": draw(LIMITS), "endpoints": ["/a", "/a/*"]},
        "b": {"limits": draw(LIMITS), "endpoints": ["/b", {"path": "/big", "cost": 2}]},
        "c": {"limits": draw(LIMITS), "endpoints": ["/c"], "mode": draw(st.sampled_from(["enforce", "shadow"]))},
    }
    config = {"categories": found, "unmatched": draw(st.sampled_from(["a", "b"]))}
    if draw(st.booleans()):
        config["application_limits"] = draw(LIMITS)
    return config


def replayed(made, config, trusted=("10.0.0.0/8",)):
    with tempfile.TemporaryDirectory() as folder:
        path = write_log(Path(folder, "access.log"), made)
        return replay_outcomes([path], InboundRules(config, ReplayClock(), trusted_proxies=trusted), OPTIONS)


@given(calls(), categories())
def test_a_replay_decides_what_the_middlewares_decided(made, config):
    expected = drive_wsgi(made, config, trusted_proxies=["10.0.0.0/8"])
    assert drive_asgi(made, config, trusted_proxies=["10.0.0.0/8"]) == expected
    assert replayed(made, config) == expected


@given(calls(took=st.sampled_from([0, 1, 250, 3000])), st.integers(1, 3), LIMITS)
def test_slots_and_charges_by_status_are_settled_when_a_response_ends(made, slots, limits):
    config = {
        "categories": {
            "a": {"limits": [f"{slots}/1h concurrency"], "endpoints": ["/a", "/a/*"]},
            "b": {"limits": limits, "endpoints": ["/b"], "refund": [404], "penalty": {"401": 2}},
            "c": {"limits": limits, "endpoints": ["/c"], "count": ["4xx", "5xx"]},
        }
    }
    distinct = [call._replace(at=call.at * 7 + place * 10_000) for place, call in enumerate(made)]
    overlapping = [call._replace(at=call.at + place) for place, call in enumerate(made)]
    for each in (distinct, overlapping):
        assert replayed(each, config) == drive_wsgi(each, config, trusted_proxies=["10.0.0.0/8"])


@given(calls(), LIMITS)
def test_clients_that_are_denied_too_often_are_blocked(made, limits):
    config = {
        "categories": {"a": {"limits": limits, "endpoints": ["/a", "/b", "/c"]}},
        "block_after": "2/10s",
        "block_for": "5s",
        "exempt_clients": ["203.0.113.2"],
        "blocked_clients": ["2001:db8::1"],
    }
    assert replayed(made, config) == drive_wsgi(made, config, trusted_proxies=["10.0.0.0/8"])


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3000), st.sampled_from(["p", "q"]), st.sampled_from(["x", "vip:1", "10.0.0.1"]),
            st.integers(1, 3),
        ),
        max_size=40,
    ),
    LIMITS,
    LIMITS,
)  # fmt: skip
def test_a_replay_decides_what_a_service_decided(asked, first, second):
    policies = {
        "p": {"limits": first, "overrides": [{"key": "vip:*", "limits": ["10/1s"]}]},
        "q": {"limits": second, "mode": "shadow"},
    }
    made, at = [], 0
    for gap, policy, key, cost in asked:
        at += gap
        made.append((at, policy, key, cost))
    expected = drive_service(made, policies)
    lines = [f"{START + at},{policy},{key},{cost}" for at, policy, key, cost in made]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calls.csv")
        path.write_text("\n".join(["time,policy,key,cost", *lines, ""]))
        if not made:
            return
        rules = ServiceRules(load_settings({"policies": policies}).policies, ReplayClock())
        assert replay_outcomes([path], rules, LogOptions()) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 400, 1000, 2500]), st.sampled_from(["/v1/items", "/v1/big"])), min_size=1
    ),
    st.sampled_from(["sliding_log", "fixed_window", "token_bucket", "sliding_window"]),
)
def test_a_replay_decides_what_a_transport_decided(asked, algorithm):
    settings = {
        "domain": "x.example",
        "limits": [f"3/1s {algorithm}", f"7/10s {algorithm}"],
        "endpoints": [{"path": "/v1/big", "cost": 2}],
    }
    made, at = [], 0
    for gap, path in asked:
        at += gap
        made.append(Call(at, target=f"https://api.x.example{path}"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sent.jsonl")
        path.write_text("".join(f'{{"ts": {START + call.at}, "url": "{call.target}"}}\n' for call in made))
        found = replay_outcomes([path], OutboundRules(Providers.of(settings), ReplayClock()), LogOptions())
    assert found == drive_transport(made, Providers.of(settings))


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 400, 20_000, 60_000, 3_600_000]), st.sampled_from(["small", "large"]),
                  st.integers(0, 900), st.sampled_from([0, 300, 90_000])),
        min_size=1, max_size=30,
    ),
    st.sampled_from(["rolling", "fixed"]),
    st.sampled_from([{}, {"concurrency": 2}, {"reserved": {1: 0.5}}]),
)  # fmt: skip
def test_a_replay_decides_what_a_budget_decided(asked, strategy, more):
    settings = {
        "tiers": {"minute": 4, "day": 12}, "types": {"large": {"hour": 2}, "small": {}},
        "costs": {"tokens": {"hour": 2000}}, "strategy": strategy, "store": "memory://", **more,
    }  # fmt: skip
    clock, ends, expected, lines, at = ManualClock(START / 1000), [], [], [], 0
    with TaskBudget.from_config(settings, clock=clock) as budget:

        def advance(until):
            clock.advance((START + until - clock.steady() // 1000) / 1000)

        for gap, model, tokens, took in asked:
            at += gap
            while ends and min(ends)[0] <= at:
                ends.remove(first := min(ends))
                advance(first[0])
                budget.record_completed_tasks(1, task_type=first[2], cost={"tokens": first[3]}, result=first[4])
            advance(at)
            result = budget.check_all_limits(1, task_type=model, cost={"tokens": tokens})
            expected.append(result.allowed)
            if result.allowed:
                ends.append((at + took, len(expected), model, tokens, result))
                if not took:
                    ends.pop()
                    budget.record_completed_tasks(1, task_type=model, cost={"tokens": tokens}, result=result)
            lines.append(f"{START + at},{took},{model},{tokens}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "usage.csv")
        path.write_text("\n".join(["start,duration,model,tokens", *lines, ""]))
        options = LogOptions(columns={"duration_unit": "ms"})
        assert replay_outcomes([path], BudgetRules(settings, ReplayClock()), options) == expected
