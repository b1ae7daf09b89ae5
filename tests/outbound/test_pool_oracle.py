"""Pools and plain providers against an oracle: a provider that only counts what arrives, and answers at random.

Whatever it answers, and however long that takes: no key gets more requests in any window than its quota, each call ends
by its deadline plus the time of one response, and tries each member at most once in an attempt.
"""

from collections import Counter, defaultdict
from contextlib import suppress
from email.utils import formatdate
from random import Random

import httpx
import pytest

from tests.cases import cases
from tests.outbound.pool_client import URL, pool
from tests.seeds import seeds
from tidegate import Denied
from tidegate.outbound import Providers, request_options
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

START = 1_767_225_600
PERIOD = 60
MAX_NETWORK_DELAY = PERIOD / 40  # that permits cover if responses are slow, see `quota.arrival`
CALLS = 60
STATUSES = (200, 200, 200, 401, 403, 429, 429, 429, 500, 503)


class Oracle:
    """A provider whose responses are drawn at random; notes when requests arrive at each key."""

    def __init__(self, random, clock):
        self.random, self.clock = random, clock
        self.arrivals = defaultdict(list)
        self.of_call = []  # the members that one call was sent by
        self.slowest = random.choice([0, 0, 0.2, 5, 20])
        self.network_delay = min(self.slowest, MAX_NETWORK_DELAY)
        # Some keys answer every call in the same way.
        self.fixed = {name: random.choice(STATUSES) for name in "abcde" if random.random() < 0.3}

    def __call__(self, request):
        key = request.headers["authorization"].removeprefix("Bearer key-")
        random, clock = self.random, self.clock
        clock.advance(random.random() * self.network_delay)
        self.arrivals[key].append(clock.now())
        self.of_call.append(key)
        clock.advance(random.random() * self.slowest)
        status = self.fixed.get(key) or random.choice(STATUSES)
        if random.random() < 0.05:
            raise random.choice([httpx.ReadTimeout, httpx.RemoteProtocolError])("lost")
        return httpx.Response(status, headers=self.headers(status), json={})

    def headers(self, status):
        if status not in (403, 429, 503):
            return {}
        past = formatdate(self.clock.now() - 1000, usegmt=True)
        return self.random.choice(
            [
                {},
                {},
                {"retry-after": "0"},
                {"retry-after": past},
                {"retry-after": "-5"},
                {"retry-after": "0.0004"},
                {"retry-after": "1"},
                {"retry-after": "90"},
                {"retry-after": "nan"},
                {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1ms"},
            ]
        )

    def most_in_a_period(self, key):
        """Count what arrived at most in any window of a period."""
        found = self.arrivals[key]
        return max((sum(start <= each < start + PERIOD for each in found) for start in found), default=0)


@pytest.fixture(autouse=True)
def impatient_clocks(monkeypatch):
    """Let a ManualClock move at once: threads of other tests may exist, but none of this one would move it."""
    monkeypatch.setattr("tidegate._runtime.clock.IDLE_GRACE", 0.0001)


@pytest.mark.seeds
@cases("seed", seeds(40))
def test_no_key_gets_more_than_its_quota_and_each_call_ends_in_time(seed):
    random, clock = Random(seed), ManualClock(START)
    oracle, names = Oracle(random, clock), "abcde"[: random.randint(1, 5)]
    quotas = {name: random.randint(1, 8) for name in names}
    members = [{"name": n, "api_key": f"key-{n}", "limits": [f"{quota}/1m"]} for n, quota in quotas.items()]
    retries = random.choice([0, 0, 1, 3])
    settings = {**pool(*members, pick=random.choice(["order", "weight"])), "retries": {"max": retries, "within": "30s"}}
    transport = RateLimitTransport(
        Providers.of(settings), MemoryStore(clock=clock), httpx.MockTransport(oracle), jitter=random.random
    )
    statuses = Counter()
    with httpx.Client(transport=transport) as client:
        for _ in range(CALLS):
            timeout, began = random.choice([0, 0.5, 10, 100]), clock.now()
            oracle.of_call.clear()
            try:
                with request_options(timeout=timeout):
                    statuses[client.post(URL, json={"model": "m", "max_tokens": 5}).status_code] += 1
            except Denied:
                statuses["denied"] += 1
            except httpx.TransportError:
                statuses["lost"] += 1
            assert clock.now() - began <= (timeout or 30) + 2 * oracle.slowest + 0.001
            assert max(Counter(oracle.of_call).values(), default=0) <= 1 + retries
            clock.advance(random.choice([0, 0, 0, 0.1, 3, 20]))
    for name, quota in quotas.items():
        assert oracle.most_in_a_period(name) <= quota, name
    assert len(statuses) > 1


PLAIN = {"domain": "api.test", "name": "models"}


@pytest.mark.seeds
@cases("settings", [PLAIN, pool("a")])
@cases("seed", seeds(20))
def test_no_period_exceeds_the_quota_while_responses_become_slow_and_quick_again(settings, seed):
    """Slow responses exhaust the allowance for exact counting; permits charged before have the smaller margin."""
    random, clock = Random(seed), ManualClock(START)
    oracle, quota = Oracle(random, clock), 1 + seed % 3
    oracle.fixed, oracle.network_delay = {"a": 200}, MAX_NETWORK_DELAY
    known = Providers.of({**settings, "limits": [f"{quota}/1m"]})
    transport = RateLimitTransport(known, MemoryStore(clock=clock), httpx.MockTransport(oracle))
    with httpx.Client(transport=transport, headers={"authorization": "Bearer key-a"}) as client:
        for call in range(120):
            oracle.slowest = 0.2 if 40 <= call < 80 else 20
            with suppress(httpx.TransportError):
                client.post(URL, json={"model": "m", "max_tokens": 5})
            clock.advance(random.choice([0, 0, 0, 0.1, 3]))
    assert len(oracle.arrivals["a"]) == 120
    assert oracle.most_in_a_period("a") <= quota
