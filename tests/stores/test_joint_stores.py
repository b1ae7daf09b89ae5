"""Joint reservations on every store: threads, tasks and leases admit exactly what fits, and settle exactly."""

import asyncio
import contextlib
import threading

import pytest

from tests.servers.valkey import ValkeyCluster, ValkeyServer
from tidegate import AsyncLimiter, Denied, Limiter, reserve, reserve_async
from tidegate.stores import open_store
from tidegate.stores._outage import GuardedStore

STORES = ("memory", "sqlite", "redis", "postgres", "cluster", "cluster-tag", "leased", "guarded")


@pytest.fixture(scope="module")
def urls(tmp_path_factory, postgres_url):
    path = tmp_path_factory.mktemp("joint")
    with ValkeyServer() as valkey, ValkeyCluster() as cluster:
        patient = "connect_timeout=10&timeout=10"
        yield {
            "memory": "memory://",
            "sqlite": f"sqlite:///{path}/a.db",
            "redis": f"{valkey.url}?{patient}",
            "postgres": f"{postgres_url}?{patient}",
            "cluster": f"{cluster.url}?{patient}",
            "cluster-tag": f"{cluster.url}?{patient}&hash_tag=all&prefix=tagged",
            "leased": f"{valkey.url}?{patient}&prefix=leased",
            "guarded": f"{valkey.url}?{patient}&prefix=guarded",
        }


@pytest.fixture(params=STORES)
def store(request, urls):
    found = open_store(urls[request.param])
    if request.param == "guarded":
        found = GuardedStore(found)
    yield request.param, found
    found.close()


pytestmark = pytest.mark.once("cluster-tag")


def make(kind, store, limiter):
    """A user's limit of 40 and a team's limit of 25 calls, and tokens."""
    options = {"store": store, **({"lease": 1.0} if kind == "leased" else {})}
    users = limiter("40/1h fixed_window", name=f"a-users-{limiter.__name__}", **options)
    limits = ["25/1h sliding_log name=calls", "1000/1h fixed_window unit=tokens name=tokens"]
    return users, limiter(limits, name=f"b-teams-{limiter.__name__}", **options)


def test_threads_admit_exactly_what_fits_and_settle_it(store):
    users, teams = make(*store, Limiter)
    outcomes = []

    def work():
        for _ in range(12):
            try:
                held = reserve([(users, "u", 1), (teams, "red", {"requests": 1, "tokens": 30})])
            except Denied:
                outcomes.append(0)
            else:
                held.commit({"tokens": 10})
                outcomes.append(1)

    several = [threading.Thread(target=work) for _ in range(4)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    kind, _ = store
    assert sum(outcomes) <= 25
    assert sum(outcomes) == 25 or kind in ("cluster", "leased"), "several steps, or terms of leases: may deny more"
    assert users.usage("u")["1h"].used == sum(outcomes)
    assert teams.usage("red")["calls"].used == sum(outcomes)
    assert teams.usage("red")["tokens"].used == 10 * sum(outcomes)


async def test_tasks_admit_exactly_what_fits_and_cancel_it(store):
    users, teams = make(*store, AsyncLimiter)
    outcomes = []

    async def work():
        with contextlib.suppress(Denied):
            outcomes.append(await reserve_async([(users, "u", 1), (teams, "red", {"requests": 1, "tokens": 30})]))

    await asyncio.gather(*(work() for _ in range(40)))
    kind, _ = store
    assert len(outcomes) <= 25
    assert len(outcomes) == 25 or kind in ("cluster", "leased")
    assert (await users.usage("u"))["1h"].used == len(outcomes)
    for held in outcomes:
        await held.cancel()
    assert (await users.usage("u"))["1h"].used == 0
    assert (await teams.usage("red"))["calls"].used == 0
    await users.store.close_async()
