"""A Decision as header fields."""

import math

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import ConfigError, Limit, Limiter, Policy
from tidegate.headers import STYLES, problem, read, write
from tidegate.testing import ManualClock

START = 1_728_000_000


@pytest.fixture
def clock():
    return ManualClock(START)


def decide(rules, clock, calls=1, cost=1):
    with Limiter(rules, clock=clock) as limiter:
        for _ in range(calls):
            decision = limiter.try_acquire("k", cost)
    return decision


def fields(decision, style="x"):
    return dict(write(decision, style))


def parse(value):
    return http_sf.parse(value.encode(), tltype="list")


def test_the_three_x_headers(clock):
    decision = decide(Limit(5, "1h", algorithm="sliding_log"), clock, calls=2)
    assert write(decision) == [
        ("X-RateLimit-Limit", "5"),
        ("X-RateLimit-Remaining", "3"),
        ("X-RateLimit-Reset", str(START + 3600)),
    ]


def test_a_denial_adds_retry_after(clock):
    decision = decide(Limit(5, "1h", algorithm="sliding_log"), clock, calls=6)
    assert fields(decision) == {
        "X-RateLimit-Limit": "5",
        "X-RateLimit-Remaining": "0",
        "X-RateLimit-Reset": str(START + 3600),
        "Retry-After": "3600",
    }


def test_the_ietf_fields_list_every_limit(clock):
    rules = [
        Limit(100, "1m", name="burst", algorithm="fixed_window"),
        Limit(1000, "1d", name="daily", algorithm="fixed_window"),
        Limit(90_000, "1m", unit="tokens", name="tpm", algorithm="fixed_window"),
        Limit(10, "5m", algorithm="concurrency", name="slots"),
        Limit(7500, "month", algorithm="calendar_window"),
        Limit(10, "250ms", name="quick", algorithm="fixed_window"),
    ]
    decision = decide(rules, clock, cost={"requests": 1, "tokens": 1800})
    assert [(name, value.split(", ")) for name, value in write(decision, "ietf")] == [
        (
            "RateLimit-Policy",
            [
                '"burst";q=100;w=60',
                '"daily";q=1000;w=86400',
                '"tpm";q=90000;qu="tokens";w=60',
                '"slots";q=10;qu="concurrent-requests"',  # no window: a slot is free when it is released
                '"month";q=7500;w=2678400',
                '"quick";q=10',  # no window: the format has no fractions of a second
            ],
        ),
        (
            "RateLimit",
            [
                '"burst";r=99;t=60',
                '"daily";r=999;t=86400',
                '"tpm";r=88200;t=60',
                '"slots";r=9',
                '"month";r=7499;t=2419200',
                '"quick";r=9;t=1',
            ],
        ),
    ]


def test_a_calendar_window_has_its_current_length():
    clock = ManualClock(1_739_000_000)  # February 2025
    decision = decide(Limit(7500, "month", algorithm="calendar_window"), clock)
    assert fields(decision, "ietf")["RateLimit-Policy"] == f'"month";q=7500;w={28 * 86_400}'


def test_the_styles_both_and_none(clock):
    allowed, denied = decide("1/1h", clock), decide("1/1h", clock, calls=2)
    assert [name for name, _ in write(allowed, "both")] == [
        "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "RateLimit-Policy", "RateLimit",
    ]  # fmt: skip
    assert write(allowed, "none") == []
    assert write(denied, "none") == [("Retry-After", "3600")]


def test_an_unknown_style_is_refused(clock):
    with pytest.raises(ConfigError, match="headers: must be one of x, ietf, both, none, not 'rfc'"):
        write(decide("1/1h", clock), "rfc")


@pytest.mark.parametrize(("after", "seconds"), [(0, "1"), (0.2, "1"), (0.999_999, "1")])
def test_retry_after_is_rounded_up_and_never_0(clock, after, seconds):
    limiter = Limiter(Limit(1, "1s", algorithm="sliding_log"), clock=clock)
    assert limiter.try_acquire("k")
    clock.advance(after)
    assert fields(limiter.try_acquire("k"))["Retry-After"] == seconds


def test_times_are_rounded_up(clock):
    limiter = Limiter(Limit(1, "10s", algorithm="sliding_log"), clock=clock)
    limiter.try_acquire("k")
    clock.advance(0.5)
    headers = fields(limiter.try_acquire("k"), "both")
    assert headers["X-RateLimit-Reset"] == str(START + 10)
    assert headers["Retry-After"] == "10"
    assert headers["RateLimit"] == '"10s";r=0;t=10'


def test_a_cost_that_never_fits_gets_no_retry_after(clock):
    decision = decide("5/1m", clock, cost=6)
    assert not decision
    assert "Retry-After" not in fields(decision, "both")
    assert "never" not in str(write(decision, "both"))


def test_shadow_mode_never_sends_retry_after(clock):
    decision = decide(Policy("p", ("1/1h",), mode="shadow"), clock, calls=3)
    assert decision.violated
    for style in STYLES:
        assert "Retry-After" not in fields(decision, style)
    assert fields(decision)["X-RateLimit-Remaining"] == "0"


def test_retry_after_is_never_shorter_than_the_reset_it_is_sent_with(clock):
    """An empty bucket is full again in an hour, but has a permit in six minutes."""
    decision = decide(Limit(10, "1h", name="b"), clock, calls=11)
    headers = fields(decision, "ietf")
    assert headers["Retry-After"] == "360"
    assert headers["RateLimit"] == '"b";r=0;t=360'


def test_x_headers_describe_the_tightest_limit(clock):
    limiter = Limiter([Limit(3, "1s", algorithm="fixed_window"), Limit(5, "1h", algorithm="fixed_window")], clock=clock)
    assert fields(limiter.try_acquire("k"))["X-RateLimit-Limit"] == "3"
    limiter.try_acquire("k")
    assert fields(limiter.try_acquire("k"))["X-RateLimit-Limit"] == "3"
    clock.advance(1)
    limiter.try_acquire("k")
    last = fields(limiter.try_acquire("k"))
    assert (last["X-RateLimit-Limit"], last["X-RateLimit-Remaining"]) == ("5", "0")
    denied = fields(limiter.try_acquire("k"))
    assert (denied["X-RateLimit-Limit"], denied["Retry-After"]) == ("5", "3599")


def test_of_several_violated_limits_the_longest_wait_is_sent(clock):
    decision = decide(
        [Limit(1, "1s", algorithm="fixed_window"), Limit(1, "1h", algorithm="fixed_window")], clock, calls=2
    )
    assert fields(decision)["X-RateLimit-Reset"] == str(START + 3600)
    never = decide([Limit(2, "1h", algorithm="fixed_window"), Limit(1, "1s", algorithm="fixed_window")], clock, cost=2)
    assert fields(never)["X-RateLimit-Limit"] == "1"


def test_of_equal_limits_the_latest_reset_is_sent(clock):
    decision = decide([Limit(2, "1s", algorithm="fixed_window"), Limit(2, "1h", algorithm="fixed_window")], clock)
    assert fields(decision)["X-RateLimit-Reset"] == str(START + 3600)


def test_remaining_is_never_more_than_the_quota(clock):
    decision = decide(Limit(10, "1m", burst=50), clock)
    assert decision.remaining == 49
    headers = fields(decision, "both")
    assert (headers["X-RateLimit-Limit"], headers["X-RateLimit-Remaining"]) == ("10", "10")
    assert headers["RateLimit"].startswith('"1m";r=10;')


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("plain", '"plain"'),
        ('say "hi"\\', r'"say \"hi\"\\"'),
        ("naïve", '"na%C3%AFve"'),
        ("a\r\nSet-Cookie: x=1", '"a%0D%0ASet-Cookie: x=1"'),
        ("\0\x7f", '"%00%7F"'),
        ("\ud800", '"%ED%A0%80"'),
    ],
)
def test_any_name_is_written_as_a_valid_string(clock, name, written):
    decision = decide(Limit(5, "1m", name=name), clock)
    assert fields(decision, "ietf")["RateLimit-Policy"] == f"{written};q=5;w=60"
    assert parse(fields(decision, "ietf")["RateLimit"])


def test_quotas_beyond_a_structured_integer_are_clamped(clock):
    decision = decide(Limit(2**53 - 1, "1d", algorithm="fixed_window", name="n"), clock)
    assert fields(decision, "ietf")["RateLimit"] == '"n";r=999999999999999;t=86400'


limits = st.builds(
    Limit,
    st.integers(1, 50),
    st.sampled_from(["250ms", "1s", "90s", "1h"]),
    algorithm=st.sampled_from(["token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"]),
    unit=st.sampled_from(["requests", "tokens", "übrig"]),
    name=st.text(min_size=1, max_size=20),
)


@given(
    st.lists(limits, min_size=1, max_size=4, unique_by=lambda limit: limit.name), st.integers(0, 60), st.integers(0, 9)
)
def test_all_written_fields_are_valid_and_can_be_read(rules, calls, millis):
    clock = ManualClock(START)
    cost = dict.fromkeys((limit.unit for limit in rules), 1)
    with Limiter(rules, clock=clock) as limiter:
        for _ in range(calls):
            limiter.try_acquire("k", cost)
            clock.advance(millis / 1000)
        decision = limiter.try_acquire("k", cost)
    headers = write(decision, "both")
    assert all(value.isascii() and value.isprintable() for _, value in headers)
    for name, value in headers:
        if name.startswith("RateLimit"):
            assert http_sf.ser(parse(value)) == value
    advice = read(headers, decision.at / 1e6)
    assert len(advice.limits) == len(rules)
    assert [limit.remaining for limit in advice.limits] == [limit.remaining for limit in decision.limits]
    assert [limit.quota for limit in advice.limits] == [limit.quota for limit in decision.limits]
    if decision.allowed:
        assert advice.retry_after is None
    else:
        assert advice.retry_after == max(1, math.ceil(decision.retry / 1_000_000))


def test_problem_details(clock):
    decision = decide(["1/1m", Limit(1, "1h", name="hourly")], clock, calls=2)
    assert problem(decision) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429,
        "detail": "Rate limit exceeded. Try again in 3600 seconds.",
        "violated-policies": ["1m", "hourly"],
    }


def test_other_kinds_of_problem_details(clock):
    decision = decide("1/1s", clock, calls=2)
    assert problem(decision)["detail"] == "Rate limit exceeded. Try again in 1 second."
    busy = problem(decision, "temporary-reduced-capacity", detail="Later.", instance="urn:x")
    assert (busy["status"], busy["detail"], busy["instance"]) == (503, "Later.", "urn:x")
    assert problem(decision, "abnormal-usage-detected")["status"] == 429
    never = problem(decide("1/1s", clock, cost=2))
    assert never["detail"] == "Rate limit exceeded. The request asks for more than the limit can ever allow."
