"""Four processes share a pool over real HTTP: a provider that counts per key refuses nothing, and all keys are used."""

import json
import subprocess
import sys
from collections import Counter, deque
from contextlib import ExitStack

import pytest

from tests.outbound.pool_program import PERIOD
from tests.outbound.server import Answer, QuotaServer
from tests.servers.valkey import ValkeyServer

LIMITS = {"a": 8, "b": 16, "c": 24, "d": 32, "e": 40}  # per PERIOD
PROCESSES = 4
REQUESTS = 60  # of each process: two windows of all keys
HIDDEN_REQUESTS = 90


class CountingProvider:
    """Counts the requests of each key in every window, refuses what is over its limit, and may report the limit."""

    def __init__(self, *, reports=False):
        self.reports = reports
        self.recent = {key: deque() for key in LIMITS}
        self.served, self.refused, self.began = Counter(), [], None

    def __call__(self, request):
        key = request.headers["x-key"]
        self.began = self.began or request.at
        recent, limit = self.recent[key], LIMITS[key]
        while recent and recent[0] <= request.at - PERIOD:
            recent.popleft()
        refused = len(recent) >= limit
        if refused:
            self.refused.append(request.at)
        else:
            recent.append(request.at)
            self.served[key] += 1
        policy = f'"all";q={limit};w={PERIOD}', f'"all";r={limit - len(recent)};t={PERIOD}'
        headers = tuple(zip(("ratelimit-policy", "ratelimit"), policy, strict=True)) if self.reports else ()
        return Answer(429, (*headers, ("retry-after", "1"))) if refused else Answer(200, headers)


def send_from_processes(provider, known, requests):
    """Let all processes send their requests through a pool with these limits; returns how often each status came."""
    with ValkeyServer() as valkey, QuotaServer(respond=provider) as server, ExitStack() as stack:
        store = f"{valkey.url}?connect_timeout=5&timeout=5"
        words = [f"{server.url}/", store, str(requests), "10", *(f"{key}={limit}" for key, limit in known.items())]
        processes = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-m", "tests.outbound.pool_program", *words], stdout=subprocess.PIPE)
            )
            for _ in range(PROCESSES)
        ]
        statuses = Counter()
        for process in processes:
            out, _ = process.communicate(timeout=120)
            statuses.update(json.loads(out))
    return statuses


def test_nothing_is_refused_and_every_key_is_used():
    provider = CountingProvider()
    assert send_from_processes(provider, LIMITS, REQUESTS) == {200: PROCESSES * REQUESTS}
    assert not provider.refused
    assert set(provider.served) == set(LIMITS)


@pytest.mark.slow
def test_hidden_limits_are_learned_and_then_nothing_is_refused():
    """Each key is configured with the sum of all limits: only the first responses tell the real ones."""
    provider = CountingProvider(reports=True)
    statuses = send_from_processes(provider, dict.fromkeys(LIMITS, sum(LIMITS.values())), HIDDEN_REQUESTS)
    assert set(provider.served) == set(LIMITS)
    assert statuses[200] >= PROCESSES * (HIDDEN_REQUESTS - 10)  # the first call of each task may find no other member
    assert all(at < provider.began + 2 * PERIOD for at in provider.refused)
