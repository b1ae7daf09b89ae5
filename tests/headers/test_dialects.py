"""Each dialect is declared once: what is written by its declaration is read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import Limit, Limiter
from tidegate.headers import LimitAdvice, read, write
from tidegate.headers._dialects import (
    DIALECTS,
    FIELD_PREFIXES,
    RETRY_AFTER,
    RETRY_AFTER_MS,
    DictionaryField,
    GroupedFields,
    ListFields,
    ThreeFields,
)
from tidegate.outbound._quota.exchange import has_rate_limit_headers
from tidegate.testing import ManualClock

NOW = 1_728_000_000
WINDOW = 60

COUNTS = st.integers(0, 10**6)
RESETS = st.integers(1, 3600)


def render(dialect, quota, remaining, reset):
    """Write three numbers as fields of a dialect, by its declaration."""
    match dialect:
        case ListFields():
            policy = f'"limit";{dialect.quota}={quota};{dialect.window}={WINDOW}'
            state = f'"limit";{dialect.remaining}={remaining};{dialect.reset}={reset}'
            return {dialect.policy: policy, dialect.state: state}
        case DictionaryField():
            pairs = zip(dialect.members, (quota, remaining, reset), strict=True)
            state = ", ".join(f"{name}={number}" for name, number in pairs)
            return {dialect.state: state, dialect.policy: f"{quota};{dialect.window}={WINDOW}"}
        case ThreeFields():
            return {dialect.limit: quota, dialect.remaining: remaining, dialect.reset: reset}
        case GroupedFields():
            numbers = {"limit": quota, "remaining": remaining, "reset": f"{reset}s"}
            return {dialect.field("requests", what): number for what, number in numbers.items()}


def field_names(dialect):
    names = [*render(dialect, 1, 1, 1)]
    return [*names, dialect.reset_after, dialect.resource] if isinstance(dialect, ThreeFields) else names


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@given(quota=COUNTS, remaining=COUNTS, reset=RESETS)
def test_the_fields_of_a_dialect_are_read_back(dialect, quota, remaining, reset):
    (limit,) = read(render(dialect, quota, remaining, reset), NOW).limits
    assert (limit.quota, limit.remaining, limit.reset_after, limit.unit) == (quota, remaining, reset, "requests")


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_clients_notice_every_field_of_a_dialect(dialect):
    for name in (*field_names(dialect), RETRY_AFTER, *RETRY_AFTER_MS):
        assert name.lower().startswith(FIELD_PREFIXES)
        assert has_rate_limit_headers([(name, "1")])
        assert has_rate_limit_headers([("date", "1"), (name.upper().encode(), "1")])


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("x", LimitAdvice("default", 50, 47, 3600.0)),
        ("ietf", LimitAdvice("hourly", 50, 47, 3600.0, window=3600.0)),
        ("both", LimitAdvice("hourly", 50, 47, 3600.0, window=3600.0)),
    ],
)
def test_what_we_write_is_what_we_read(style, expected):
    with Limiter(Limit(50, "1h", "sliding_log", name="hourly"), clock=ManualClock(NOW)) as limiter:
        decision = limiter.try_acquire("k", cost=3)
    assert read(write(decision, style), NOW).limits == (expected,)


@pytest.mark.parametrize("style", ["x", "ietf", "both", "none"])
def test_the_wait_of_a_denial_is_what_we_read(style):
    with Limiter(Limit(1, "90s", "fixed_window"), clock=ManualClock(NOW)) as limiter:
        assert limiter.try_acquire("k")
        assert read(write(limiter.try_acquire("k"), style), NOW).retry_after == 90


@cases(("name", "field"), [
        ("ietf", "RateLimit-Policy"), ("ietf", "RateLimit"), ("ietf-07", "RateLimit"),
        ("ietf-06", "RateLimit-Remaining"),
        ("anthropic", "anthropic-ratelimit-requests-remaining"), ("openai", "x-ratelimit-remaining-requests"),
        ("x", "X-RateLimit-Reset"), ("x-rate-limit", "X-Rate-Limit-Limit"),
    ])  # fmt: skip
def test_the_names_are_those_that_servers_send(name, field):
    assert field in field_names(DIALECTS[name])
