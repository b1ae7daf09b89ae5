"""A cost is an integer or a mapping, in every call: also in the fast paths of a store."""

import pytest

from tests.cases import cases
from tidegate import AsyncLimiter, ConfigError, Limiter
from tidegate.testing import ManualClock

RULES = {
    "bucket": "50/1h",
    "log": "50/1h sliding_log",
    "window": "50/1h fixed_window",
    "several buckets": ["50/1h", "60/1d"],
    "several": ["50/1h sliding_log", "60/1d"],
}
OPTIONS = {"fast": {}, "observed": {"observer": lambda record: None}, "leased": {"lease": 1.0}}


@pytest.fixture(params=RULES.values(), ids=list(RULES))
def rules(request):
    return request.param


@pytest.fixture(params=OPTIONS.values(), ids=list(OPTIONS))
def limiter(request, rules):
    with Limiter(rules, clock=ManualClock(1_728_000_000), **request.param) as limiter:
        yield limiter


@cases("cost", [True, False, 1.0, 0.5, None, "1", {"requests": True}, {"requests": 1.0}])
@cases("verb", ["try_acquire", "peek", "acquire", "reserve", "refund"])
def test_what_is_no_cost_is_refused(limiter, verb, cost):
    limiter.try_acquire("k")
    before = limiter.usage("k")
    with pytest.raises(ConfigError, match="cost"):
        getattr(limiter, verb)("k", cost)
    assert limiter.usage("k") == before


@cases("cost", [True, 1.0, None])
def test_what_is_no_cost_is_refused_by_a_method_that_was_kept_before_the_rules_changed(limiter, rules, cost):
    try_acquire = limiter.try_acquire
    limiter.update(rules)
    try_acquire("k")
    with pytest.raises(ConfigError, match="cost"):
        try_acquire("k", cost)


@cases("cost", [True, 1.0, None])
async def test_what_is_no_cost_is_refused_for_tasks(rules, cost):
    for options in OPTIONS.values():
        async with AsyncLimiter(rules, clock=ManualClock(1_728_000_000), **options) as limiter:
            await limiter.try_acquire("k")
            with pytest.raises(ConfigError, match="cost"):
                await limiter.try_acquire("k", cost)
