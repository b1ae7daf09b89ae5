"""Processes that fork while they decide: no child hangs, no permit is spent twice, the parent notices nothing."""

import asyncio
import multiprocessing
import os
import statistics
import time
from itertools import count

import psycopg
import pytest

from tests.engine.forking import Spender, forking, goes_on, spending
from tests.servers.process import until
from tests.servers.valkey import ValkeyCluster
from tidegate import AsyncLimiter, Denied, Limit, Limiter

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # that is the point
]

CHILDREN = 12
CALLS = 20  # of each child
QUOTA = 10**8  # more than threads can spend before the last child has ended
LIMIT = Limit(QUOTA, "1d", "fixed_window")  # the window opens with the first call, and outlasts the test
numbers = count(1)


@pytest.fixture(scope="module")
def cluster():
    with ValkeyCluster() as servers:
        yield servers


class StoreUnderTest:
    """The URL of a store, with a long deadline, and the sessions of its server."""

    def __init__(self, url, sessions=frozenset):
        self.url = url
        self.sessions = sessions
        self.shared = url != "memory://"


def memory_place(_request, _folder):
    return StoreUnderTest("memory://")


def sqlite_place(_request, folder):
    return StoreUnderTest(f"sqlite:///{folder / 'store.db'}?deadline=20s")


def redis_place(request, _folder):
    server = request.getfixturevalue("valkey")

    def sessions():
        lines = server.ask("CLIENT", "LIST").decode().splitlines()
        return {line.split()[0] for line in lines if line.startswith("id=") and "cmd=client" not in line}

    return StoreUnderTest(f"{server.url}?deadline=20s&prefix=fork{next(numbers)}", sessions)


def cluster_place(request, _folder):
    return StoreUnderTest(f"{request.getfixturevalue('cluster').url}?deadline=20s&prefix=fork{next(numbers)}")


def postgres_place(request, _folder):
    url = request.getfixturevalue("postgres_url")
    query = "select pid from pg_stat_activity where pid <> pg_backend_pid() and datname = current_database()"

    def sessions():
        with psycopg.connect(url) as connection:
            return {pid for (pid,) in connection.execute(query)}

    return StoreUnderTest(f"{url}?deadline=20s&schema=fork{next(numbers)}", sessions)


PLACES = {
    "memory": memory_place,
    "sqlite": sqlite_place,
    "redis": redis_place,
    "cluster": cluster_place,
    "postgres": postgres_place,
}


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    return PLACES[request.param](request, tmp_path)


@pytest.fixture(params=[False, True], ids=["plain", "leased"])
def lease(request):
    return request.param


@pytest.fixture
def children(tmp_path):
    with forking(tmp_path) as family:
        yield family


def take(limiter, calls=CALLS):
    """Take permits; give how many there were."""
    return sum(limiter.try_acquire("k").allowed for _ in range(calls))


async def take_async(limiter, calls=CALLS):
    """Take permits from several tasks."""

    async def some():
        return sum([(await limiter.try_acquire("k")).allowed for _ in range(calls // 4)])

    return sum(await asyncio.gather(*(some() for _ in range(4))))


def drain(limiter):
    """Take what is left, in few calls; give how much that was."""
    taken, cost = 0, QUOTA // 10
    while cost:
        if limiter.try_acquire("k", cost).allowed:
            taken += cost
        else:
            cost //= 10
    return taken


def adds_up(limiter, taken):
    """Take all that is left: together with what was taken before, it is the quota, and no more.

    A leased store returns in the background what it did not use, so that may take some time.
    """

    def take_rest():
        nonlocal taken
        taken += drain(limiter)
        return taken >= QUOTA

    until(take_rest, "the return of all permits")
    assert taken + drain(limiter) == QUOTA


def spend(limiter):
    def run(spender):
        while not spender.ending:
            spender.saw(limiter.try_acquire("k"))

    return run


def spend_in_tasks(limiter):
    async def main(spender):
        async def task():
            while not spender.ending:
                spender.saw(await limiter.try_acquire("k"))
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(task())
        await limiter.close()

    return lambda spender: asyncio.run(main(spender))


@pytest.mark.once
def test_children_forked_while_threads_decide(place, lease, children):
    limiter = Limiter(LIMIT, store=place.url, lease=lease)

    def work():
        taken = take(limiter)
        left = limiter.usage("k").popitem()[1].remaining
        limiter.close()  # a leased one returns what it holds
        return [taken, left]

    with limiter:
        with spending(spend(limiter), threads=3) as spenders:
            sessions = place.sessions()
            for _ in range(CHILDREN):
                children.fork(work)
            answers = children.answers()
            goes_on(spenders)
            assert sessions <= place.sessions()  # no child has ended any
        assert [taken for taken, _ in answers] == [CALLS] * CHILDREN
        taken = sum(spender.taken for spender in spenders)
        if place.shared:
            adds_up(limiter, taken + CALLS * CHILDREN)
        else:
            adds_up(limiter, taken)
            assert all(QUOTA - taken - CALLS <= left <= QUOTA - CALLS for _, left in answers)
        assert limiter.store.metrics().get("failures", 0) == 0


@pytest.mark.once
def test_children_forked_while_tasks_decide(place, lease, children):
    limiter = AsyncLimiter(LIMIT, store=place.url, lease=lease)

    def work():
        async def main():
            taken = await take_async(limiter)
            await limiter.close()
            return taken

        return asyncio.run(main())

    with spending(spend_in_tasks(limiter), threads=1) as spenders:
        sessions = place.sessions()
        for _ in range(CHILDREN // 2):
            children.fork(work)
        answers = children.answers()
        goes_on(spenders)
        assert sessions <= place.sessions()
    assert answers == [CALLS] * (CHILDREN // 2)
    if place.shared:
        with Limiter(LIMIT, store=place.url) as rest:
            adds_up(rest, spenders[0].taken + sum(answers))


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_fork_does_not_wait_for_threads_that_wait_for_the_fork(place, children):
    took = []
    with Limiter(LIMIT, store=place.url) as limiter, spending(spend(limiter), threads=3):
        for _ in range(CHILDREN):
            before = time.monotonic()
            children.fork(int)
            took.append(time.monotonic() - before)
        children.answers()
    assert statistics.median(took) < 0.4  # it was a second


@pytest.mark.slow
def test_a_child_forks_children_while_its_threads_decide(place, lease, children, tmp_path):
    limiter = Limiter(LIMIT, store=place.url, lease=lease)

    def grandchild():
        taken = take(limiter)
        limiter.close()
        return taken

    def child():
        with limiter, forking(tmp_path) as family, spending(spend(limiter), threads=2) as spenders:
            family.fork(grandchild)
            family.fork(grandchild)
            answers = family.answers()
        return [sum(spender.taken for spender in spenders), *answers]

    with limiter:
        with spending(spend(limiter), threads=1) as spenders:
            children.fork(child)
            children.fork(child)
            answers = children.answers()
        assert [answer[1:] for answer in answers] == [[CALLS, CALLS]] * 2
        if place.shared:
            adds_up(limiter, spenders[0].taken + sum(map(sum, answers)))


def test_a_child_does_not_wait_behind_the_calls_that_wait_in_its_parent(place, children):
    limiter = Limiter(Limit(1, "1d", "fixed_window"), store=place.url)

    def work():
        assert limiter.waiting == 0
        assert limiter.try_acquire(f"other{os.getpid()}").allowed
        with pytest.raises(Denied):
            limiter.acquire("k", timeout=0)
        limiter.reset("k")
        assert limiter.acquire("k", timeout=10).allowed  # the first in the queue of its process

    def wait(spender):
        spender.saw(limiter.acquire("k", timeout=60))

    with limiter:
        assert limiter.try_acquire("k").allowed
        waiting = [Spender(wait) for _ in range(2)]
        for spender in waiting:
            spender.thread.start()
        until(lambda: limiter.waiting == len(waiting), "the wait")
        children.answer(children.fork(work))
        children.answer(children.fork(work))
        assert limiter.waiting == len(waiting)
        for _ in waiting:
            before = sum(spender.taken for spender in waiting)
            limiter.reset("k")
            until(lambda before=before: sum(spender.taken for spender in waiting) > before, "a permit")
        for spender in waiting:
            spender.thread.join(20)
            assert spender.error is None


# Celery's prefork pool imports the application, and may use it, in a parent that then forks its workers. Celery is not
# among the dependencies of our tests; multiprocessing's pool forks in the same way, also later, to replace a worker.

prefork: list[Limiter] = []


def prefork_job(_number):
    return [os.getpid(), prefork[0].try_acquire("k").allowed]


@pytest.mark.once
@pytest.mark.parametrize("place", ["sqlite", "redis", "postgres"], indirect=True)
def test_workers_of_a_prefork_pool_share_the_limit(place, lease):
    quota, before, jobs = 60, 10, 80
    with Limiter(Limit(quota, "1d", "fixed_window"), store=place.url, lease=lease) as limiter:
        prefork[:] = [limiter]
        assert take(limiter, before) == before
        pool = multiprocessing.get_context("fork").Pool(3, maxtasksperchild=10)
        try:
            answers = pool.map_async(prefork_job, range(jobs), chunksize=1).get(30)
        finally:
            pool.terminate()
            pool.join()
        admitted = before + sum(allowed for _, allowed in answers)
        assert len({pid for pid, _ in answers}) > 3
        assert admitted == quota if not lease else before < admitted <= quota  # those ended without returning theirs
        assert limiter.store.metrics().get("failures", 0) == 0
