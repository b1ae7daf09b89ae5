"""Four processes share a pool over real HTTP: a provider that counts per key refuses nothing, and all keys are used."""

import json
import subprocess
import sys
from collections import Counter, deque
from contextlib import ExitStack

from tests.outbound.pool_program import PERIOD
from tests.outbound.server import Answer, QuotaServer
from tests.servers.valkey import ValkeyServer

LIMITS = {"a": 8, "b": 16, "c": 24, "d": 32, "e": 40}  # per PERIOD
PROCESSES = 4
REQUESTS = 60  # of each process: two windows of all keys


class CountingProvider:
    """Counts the requests of each key in every window, and refuses what is over its limit."""

    def __init__(self):
        self.recent = {key: deque() for key in LIMITS}
        self.served, self.refused = Counter(), Counter()

    def __call__(self, request):
        key = request.headers["x-key"]
        recent = self.recent[key]
        while recent and recent[0] <= request.at - PERIOD:
            recent.popleft()
        if len(recent) >= LIMITS[key]:
            self.refused[key] += 1
            return Answer(429, (("retry-after", "1"),))
        recent.append(request.at)
        self.served[key] += 1
        return Answer(200)


def test_nothing_is_refused_and_every_key_is_used():
    provider = CountingProvider()
    with ValkeyServer() as valkey, QuotaServer(respond=provider) as server, ExitStack() as stack:
        store = f"{valkey.url}?connect_timeout=5&timeout=5"
        words = [f"{server.url}/", store, str(REQUESTS), "10", *(f"{key}={limit}" for key, limit in LIMITS.items())]
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
    assert statuses == {200: PROCESSES * REQUESTS}
    assert not provider.refused
    assert set(provider.served) == set(LIMITS)
