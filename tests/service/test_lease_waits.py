"""Batches on a leased store: calls for the same keys wait for one share, in place of a request for each call."""

import asyncio

import pytest
import redis

from tests.servers.valkey import ValkeyServer
from tidegate.core._decision import Decision
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.stores._opened import OpenedStore

WINDOW = "1000000/1h fixed_window"  # the store applies the limit itself, not a stricter one
KEYS = 20
BATCHES = 16
LEASE = 60  # seconds: a share must not end while a test runs
WITHOUT_WAITING = 9  # seconds; a call waits for a share that is being requested for up to 10


@pytest.fixture(scope="module")
def server():
    with ValkeyServer() as valkey:
        yield valkey


@pytest.fixture(params=[WINDOW, [WINDOW, "2000000/1d sliding_window"]], ids=["one limit", "two limits"])
async def service(request, server):
    with redis.Redis(port=server.port) as admin:
        admin.flushall()
    settings = load_settings({"policies": {"api": {"limits": request.param, "on_store_error": "deny"}}})
    return LeasedService(f"{server.url}?deadline=20s", settings)  # for busy machines


class LeasedService:
    """A decider on a leased store."""

    def __init__(self, url, settings):
        self._url, self._settings = url, settings
        self.store = OpenedStore.open(url, lease=LEASE).store
        self.decider = Decider(settings.policies, self.store)
        self.requests = 0  # to the shared store
        self.answers = asyncio.Event()  # while it is not set, the shared store does not answer
        self.answers.set()
        self.store.inner.ask_store_async = self._counting(self.store.inner.ask_store_async)

    def _counting(self, apply):
        async def counted(*request):
            self.requests += 1
            await self.answers.wait()
            return await apply(*request)

        return counted

    async def used(self):
        """Stop, which returns all unused permits, and return what the store counts for each key."""
        await self.decider.close()
        store = OpenedStore.open(self._url).store
        reading = Decider(self._settings.policies, store)
        usage = [await reading.usage(subject) for subject, _ in asks()]
        await reading.close()
        return [each["1h"].used for each in usage]


def asks(count=KEYS):
    return [(Subject("api", f"user:{number}"), 1) for number in range(count)]


async def test_concurrent_batches_for_the_same_keys_share_their_requests(service):
    results = await asyncio.gather(*(service.decider.batch(asks()) for _ in range(BATCHES)))
    assert all(isinstance(each, Decision) and each.allowed for batch in results for each in batch)
    assert service.requests <= KEYS * 6  # not one for each of the KEYS * BATCHES calls
    assert await service.used() == [BATCHES] * KEYS


async def test_a_batch_does_not_wait_for_the_renewal_of_a_share(service):
    for _ in range(3):
        await asyncio.gather(*(service.decider.batch(asks()) for _ in range(BATCHES)))
    shares = [each.share for each in service.store.manager.by_policy["api"].key_leases.values()]
    assert min(share.units for share in shares) >= 2
    for share in shares:
        share.renew_below = share.units  # the next call renews it
    service.answers.clear()
    before = service.requests
    async with asyncio.timeout(WITHOUT_WAITING):
        results = [await service.decider.batch(asks()) for _ in range(2)]
        assert all(each.allowed for batch in results for each in batch)
        while service.requests < before + KEYS:  # one renewal of each share, which nobody waits for
            await asyncio.sleep(0)
    assert service.requests == before + KEYS
    service.answers.set()
    assert await service.used() == [3 * BATCHES + 2] * KEYS


async def test_cancelled_batches_leave_no_charge(service):
    decider = service.decider
    await decider.batch(asks())
    waiting = [asyncio.ensure_future(decider.batch(asks())) for _ in range(BATCHES)]
    for turns, task in enumerate(waiting):
        for _ in range(turns % 5):
            await asyncio.sleep(0)
        task.cancel()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    counted = sum(not isinstance(each, BaseException) for each in done)
    assert await service.used() == [1 + counted] * KEYS


async def test_a_denied_key_does_not_wait_for_a_share(service):
    decider = service.decider
    await decider.batch([(Subject("api", "full"), 900_000)])
    first = await decider.batch([(Subject("api", "full"), 100_000), (Subject("api", "full"), 1)])
    before = service.requests
    again = await decider.batch([(Subject("api", "full"), 1)] * 5)
    assert all(isinstance(each, Decision) for each in (*first, *again))
    assert service.requests - before <= 5
    await service.used()


async def test_a_lost_store_denies_at_once():
    with ValkeyServer() as lost:
        settings = load_settings({"policies": {"api": {"limits": "1000/1h", "on_store_error": "deny"}}})
        store = OpenedStore.open(lost.url, lease=True).store
        decider = Decider(settings.policies, store)
        await decider.batch(asks())
        lost.kill()
        for _ in range(3):
            results = await asyncio.wait_for(decider.batch(asks() * 40), 20)
            if not any(isinstance(each, Decision) and each.allowed for each in results):
                break
        assert not any(isinstance(each, Decision) and each.allowed for each in results)
        await decider.close()
