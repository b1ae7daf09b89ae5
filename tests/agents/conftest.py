"""Every store in which runs are kept, with a clock that tests advance."""

import pytest

from tests.servers.valkey import ValkeyCluster, ValkeyServer
from tidegate.stores import open_store
from tidegate.testing import ManualClock

STORES = ("memory", "sqlite", "redis", "cluster", "postgres")


@pytest.fixture(scope="module")
def urls(tmp_path_factory, postgres_url):
    path = tmp_path_factory.mktemp("runs")
    with ValkeyServer() as valkey, ValkeyCluster() as cluster:
        patient = "connect_timeout=10&timeout=10"
        yield {
            "memory": "memory://",
            "sqlite": f"sqlite:///{path}/runs.db?synchronous=normal",
            "redis": f"{valkey.url}?{patient}",
            "cluster": f"{cluster.url}?{patient}",
            "postgres": f"{postgres_url}?{patient}",
        }


@pytest.fixture
def clock():
    return ManualClock(start=1_800_000_000)


@pytest.fixture(params=STORES)
def store(request, urls, clock):
    found = open_store(urls[request.param], clock=clock)
    yield found
    found.close()


@pytest.fixture
def memory(clock):
    return open_store("memory://", clock=clock)
