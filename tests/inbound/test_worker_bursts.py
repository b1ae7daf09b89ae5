"""Two workers on a healthy store: the first burst after a start, and one after kill -9, get exactly the limit."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.inbound.servers import serving
from tests.servers.process import until
from tests.servers.valkey import ValkeyServer

LIMIT = 10


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.mark.parametrize("mode", ["deny", "allow", "local"])
def test_bursts_get_the_whole_limit(valkey, mode):
    valkey.ask("FLUSHALL")
    site = serving(
        "uvicorn", "worker_site:app", "--workers", "2", STORE=f"{valkey.url}?deadline=20s", ON_STORE_ERROR=mode
    )
    with (
        site as url,
        httpx.Client(base_url=url, trust_env=False, timeout=30) as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def ask(path):
            return httpx.get(f"{url}{path}", trust_env=False, timeout=30)

        def burst(path):
            return [reply.status_code for reply in threads.map(ask, [path] * (2 * LIMIT))].count(200)

        workers = set()

        def has_both():
            workers.add(int(ask("/free").text))
            return len(workers) == 2

        until(has_both, "both workers")
        assert burst("/first") == LIMIT
        os.kill(min(workers), signal.SIGKILL)
        until(lambda: client.get("/free").text != str(min(workers)), "a worker that lives")
        assert burst("/second") == LIMIT
