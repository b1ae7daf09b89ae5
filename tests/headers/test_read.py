"""Rate limit fields of other servers: every dialect, and malformed fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate.headers import Advice, LimitAdvice, read
from tidegate.headers._values import MAX_SECONDS

NOW = 1_728_000_000.0  # 2024-10-04T00:00:00Z


def test_the_ietf_lists():
    advice = read(
        [
            ("RateLimit-Policy", '"burst";q=100;w=60, "daily";q=1000;w=86400;qu="tokens";pk=:YQ==:'),
            ("RateLimit", '"burst";r=50;t=30, "daily"; r=999; comment="x"'),
        ],
        NOW,
    )
    assert advice == Advice(
        (
            LimitAdvice("burst", 100, 50, 30.0, "requests", 60.0),
            LimitAdvice("daily", 1000, 999, None, "tokens", 86_400.0),
        )
    )
    assert advice.tightest == advice.limits[0]
    assert (advice.remaining, advice.reset_after, advice.retry_after) == (50, 30.0, None)


def test_repeated_fields_are_joined_and_names_are_case_insensitive():
    lines = [(b"RATELIMIT", b'"a";r=5'), ("ratelimit", '"b";r=3;t=9'), (b"Retry-After", "7"), ("retry-AFTER", b"9")]
    advice = read(lines, NOW)
    assert [(limit.name, limit.remaining) for limit in advice.limits] == [("a", 5), ("b", 3)]
    assert advice.retry_after == 9


def test_headers_may_be_a_mapping_of_values_or_lists():
    assert (
        read({"RateLimit": '"a";r=5'}, NOW)
        == read({"ratelimit": ['"a";r=5']}, NOW)
        == read([("RateLimit", '"a";r=5')], NOW)
    )


def test_one_of_the_two_fields_is_enough():
    assert read({"RateLimit": '"a";r=5;t=1'}, NOW).limits == (LimitAdvice("a", None, 5, 1.0),)
    assert read({"RateLimit-Policy": '"a";q=5;w=1'}, NOW).limits == (LimitAdvice("a", 5, None, None, "requests", 1.0),)


def test_for_a_repeated_name_the_partition_with_less_left_is_used():
    advice = read({"RateLimit": '"a";r=5;t=1;pk=:YQ==:, "a";r=2;t=9;pk=:Yg==:, "a";r=3'}, NOW)
    assert advice.limits == (LimitAdvice("a", None, 2, 9.0),)


@cases("field", [
     '"a";r=-1', '"a";r=1.5', "a;r=5", '"a"', '"a";r="5"', '"a";r', '"a";r=?1', '"a";r=5;t=-1', '"a";r=5;t=1.0',
     "5;r=5", '("a");r=5', '"a";r=5;pk="x"', '"a";r=5,', '"a";r=5 "b";r=5', '"a";r=9999999999999999',
     '"a";r=5;t=@99', "", "\0", '"a";r=5, b;r=5', '"ä";r=5', '"a";R=5', "@99999999999999999;r=5",
     '%"a";r=5'])  # fmt: skip
def test_a_malformed_field_is_ignored_as_a_whole(field):
    assert read({"RateLimit": f'"good";r=1, {field}'}, NOW) == Advice()
    assert read({"RateLimit": field, "X-RateLimit-Remaining": "7"}, NOW).remaining == 7


@cases("field", [
     '"a";q=-1', '"a";q=1.5', "a;q=5", '"a"', '"a";q=5;w=0', '"a";q=5;w=-1', '"a";q=5;w=1.5', '"a";q=5;qu=tokens',
     '"a";q=5;pk=abc', '"a";q', '"a";w=5'])  # fmt: skip
def test_a_malformed_policy_is_ignored_as_a_whole(field):
    assert read({"RateLimit-Policy": f'"good";q=1, {field}'}, NOW) == Advice()
    assert read({"RateLimit-Policy": field, "RateLimit": '"a";r=5'}, NOW).limits == (LimitAdvice("a", None, 5),)


def test_draft_07():
    advice = read({"RateLimit": "limit=100, remaining=50, reset=5", "RateLimit-Policy": "100;w=10, 1000;w=3600"}, NOW)
    assert advice.limits == (LimitAdvice("default", 100, 50, 5.0, "requests", 10.0),)
    assert read({"RateLimit": "limit=100, remaining=50, reset=5"}, NOW).limits[0].window is None


@pytest.mark.parametrize(
    "field",
    ["limit=100, remaining=-1, reset=5", "limit=100, remaining=5", "limit=100, remaining=5, reset=x", "limit",
     "limit=(1 2), remaining=5, reset=5", "limit=100, remaining=5, reset=1.5", "limit=?1, remaining=5, reset=5"],
)  # fmt: skip
def test_malformed_draft_07_is_ignored(field):
    assert read({"RateLimit": field}, NOW) == Advice()


def test_drafts_00_to_06():
    lines = [
        ("RateLimit-Limit", "100, 100;w=60;comment=x, 1000;w=3600"),
        ("RateLimit-Remaining", "50"),
        ("RateLimit-Reset", "30"),
    ]
    assert read(lines, NOW).limits == (LimitAdvice("default", 100, 50, 30.0, "requests", 60.0),)


@cases("prefix", ["X-RateLimit", "X-Rate-Limit", "RateLimit"])
@cases("reset", ["60", "1728000060", "1728000060000", "60s", "1m", "Fri, 04 Oct 2024 00:01:00 GMT"])
def test_three_fields_with_one_number_each(prefix, reset):
    lines = {f"{prefix}-Limit": "100", f"{prefix}-Remaining": "99", f"{prefix}-Reset": reset}
    assert read(lines, NOW).limits == (LimitAdvice("default", 100, 99, 60.0),)


def test_github():
    lines = {
        "x-ratelimit-limit": "5000",
        "x-ratelimit-remaining": "4987",
        "x-ratelimit-reset": "1728000600",
        "x-ratelimit-used": "13",
        "x-ratelimit-resource": "core",
    }
    assert read(lines, NOW).limits == (LimitAdvice("core", 5000, 4987, 600.0),)


def test_a_reset_in_the_past_is_now():
    assert read({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1727999999"}, NOW).reset_after == 0


def test_reset_after_of_discord():
    lines = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset-After": "1.25"}
    assert read(lines, NOW).limits == (LimitAdvice("default", None, 0, 1.25),)


def test_several_limits_in_lists():
    lines = {"X-RateLimit-Limit": "10, 1000", "X-RateLimit-Remaining": "9, 500", "X-RateLimit-Reset": "1, 3600"}
    assert read(lines, NOW).limits == (
        LimitAdvice("default-1", 10, 9, 1.0),
        LimitAdvice("default-2", 1000, 500, 3600.0),
    )


def test_of_repeated_values_the_safest_is_used():
    lines = [
        ("X-RateLimit-Limit", "100"),
        ("X-RateLimit-Remaining", "99"),
        ("X-RateLimit-Remaining", "5"),
        ("X-RateLimit-Reset", "9"),
    ]
    assert read(lines, NOW).limits == (LimitAdvice("default", 100, 5, 9.0),)


@cases("value", ["-1", "many", "", "1e3", "5;5", "0x5", "\u0665", "5, -1"])
def test_malformed_numbers_are_ignored(value):
    assert read({"X-RateLimit-Remaining": value}, NOW) == Advice()


def test_anthropic():
    lines = {
        "anthropic-ratelimit-requests-limit": "50",
        "anthropic-ratelimit-requests-remaining": "49",
        "anthropic-ratelimit-requests-reset": "2024-10-04T00:00:01Z",
        "anthropic-ratelimit-input-tokens-limit": "30000",
        "anthropic-ratelimit-input-tokens-remaining": "29000",
        "anthropic-ratelimit-input-tokens-reset": "2024-10-04T02:00:02+02:00",
        "anthropic-priority-output-tokens-remaining": "7",
        "anthropic-version": "2023-06-01",
        "retry-after": "12",
    }
    assert read(lines, NOW) == Advice(
        (
            LimitAdvice("requests", 50, 49, 1.0),
            LimitAdvice("input-tokens", 30_000, 29_000, 2.0, "input-tokens"),
            LimitAdvice("priority-output-tokens", None, 7, None, "output-tokens"),
        ),
        12.0,
    )


def test_openai():
    lines = {
        "x-ratelimit-limit-requests": "10000",
        "x-ratelimit-remaining-requests": "9999",
        "x-ratelimit-reset-requests": "8.64s",
        "x-ratelimit-limit-tokens": "200000",
        "x-ratelimit-remaining-tokens": "199000",
        "x-ratelimit-reset-tokens": "6m0s",
        "x-ratelimit-remaining-project-tokens": "5",
        "x-ratelimit-renewalperiod-tokens": "60",
    }
    assert read(lines, NOW).limits == (
        LimitAdvice("requests", 10_000, 9999, 8.64),
        LimitAdvice("tokens", 200_000, 199_000, 360.0, "tokens", 60.0),
        LimitAdvice("project-tokens", None, 5, None, "tokens"),
    )


def test_kong_and_mistral_have_the_period_in_the_name():
    lines = {
        "X-RateLimit-Limit-Minute": "10",
        "X-RateLimit-Remaining-Minute": "9",
        "x-ratelimit-remaining-tokens-month": "8",
        "x-ratelimit-remaining-req-second": "7",
        "x-ratelimit-remaining-images": "6",
    }
    assert [(limit.name, limit.unit, limit.window) for limit in read(lines, NOW).limits] == [
        ("minute", "requests", 60.0),
        ("tokens-month", "tokens", None),
        ("req-second", "requests", 1.0),
        ("images", "images", None),
    ]


def test_the_newest_dialect_that_says_what_remains_is_used():
    lines = {"RateLimit": '"a";r=5', "X-RateLimit-Remaining": "7", "RateLimit-Remaining": "6"}
    assert read(lines, NOW).remaining == 5
    del lines["RateLimit"]
    assert read(lines, NOW).remaining == 6
    assert read({"RateLimit-Policy": '"a";q=5', "X-RateLimit-Remaining": "7"}, NOW).remaining == 7


@cases(
    ("lines", "seconds"),
    [
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "60"}, 60),  # they disagree: the longer one
        ({"retry-after-ms": "5000", "retry-after": "1"}, 5),
        ({"retry-after-ms": "soon", "retry-after": "1"}, 1),
        ({"retry-after-ms": "9" * 50}, MAX_SECONDS),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Fri, 04 Oct 2024 00:00:07 GMT"}, 7),
    ],
)
def test_retry_after_in_seconds_and_milliseconds(lines, seconds):
    assert read(lines, NOW).retry_after == seconds


def test_absurd_values_are_clamped():
    advice = read(
        {"X-RateLimit-Limit": "9" * 30, "X-RateLimit-Remaining": "9" * 5000, "X-RateLimit-Reset": "9" * 30}, NOW
    )
    assert advice.limits == (LimitAdvice("default", 2**53 - 1, 2**53 - 1, MAX_SECONDS),)
    advice = read({"RateLimit": '"a";r=999999999999999;t=999999999999999'}, NOW)
    assert advice.reset_after == MAX_SECONDS


def test_many_or_long_fields_are_bounded():
    assert len(read([(f"x-ratelimit-remaining-{i}", "1") for i in range(10_000)], NOW).limits) == 32
    assert read([("RateLimit", '"a";r=1')] * 10_000, NOW) == Advice()  # joined, longer than the bound of a field
    assert read({"RateLimit": '"' + "a" * 65_536 + '";r=1', "X-RateLimit-Remaining": "1" * 65_536}, NOW) == Advice()


@cases("headers", [None, [], {}, "text", [1, 2], [("a",)], [("a", "b", "c")], [(None, None)], [(b"\xff", b"\xff")]])
def test_headers_without_limits_give_no_advice(headers):
    advice = read(headers, NOW)
    assert not advice
    assert (advice.tightest, advice.remaining, advice.reset_after) == (None, None, None)


NAMES = [
    "RateLimit", "RateLimit-Policy", "RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset", "X-RateLimit-Limit",
    "X-RateLimit-Remaining", "x-rate-limit-reset", "X-RateLimit-Reset-After", "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests", "anthropic-ratelimit-tokens-reset", "anthropic-ratelimit-tokens-limit", "Retry-After",
    "retry-after-ms", "x-ratelimit-limit-\0", "ratelimit\n",
]  # fmt: skip
VALUES = st.one_of(
    st.text(),
    st.binary(),
    st.integers(),
    st.text(st.sampled_from('"ab;=, rtqw0123456789.-:@()?%*\\\0\n'), max_size=60),
    st.lists(st.sampled_from(['"a";r=5;t=3', '"b";q=7;w=60', "limit=1", "5", "-1", "6m0s", "@99"])).map(", ".join),
    st.sampled_from(["9" * 65_536, "\0" * 65_536, '"' * 8000, "(" * 8000, "a;" * 4000, "1," * 4000]),
    st.none(),
)


@given(
    st.lists(st.tuples(st.one_of(st.sampled_from(NAMES), st.text(), st.binary()), VALUES), max_size=12),
    st.floats(0, 1e12),
)
def test_reading_never_raises_and_returns_bounded_values(headers, now):
    advice = read(headers, now)
    assert advice == read([(name, value) for name, value in headers if isinstance(value, (str, bytes, int))], now)
    assert advice.retry_after is None or 0 <= advice.retry_after <= MAX_SECONDS
    for limit in advice.limits:
        assert isinstance(limit.name, str)
        assert isinstance(limit.unit, str)
        assert limit.quota is None or 0 <= limit.quota < 2**53
        assert limit.remaining is None or 0 <= limit.remaining < 2**53
        assert limit.reset_after is None or 0 <= limit.reset_after <= MAX_SECONDS
        assert limit.window is None or 0 < limit.window <= MAX_SECONDS
