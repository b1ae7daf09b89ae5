"""A client disconnects while its pipeline runs: calls without a reply stay uncharged, as over HTTP."""

import asyncio

import pytest

from tests.service.resp.harness import connected, encode
from tidegate.outbound import AsyncGate, Providers
from tidegate.service._decisions.signing import SECRETS
from tidegate.stores import MemoryStore
from tidegate.stores._outage import GuardedStore

POLICIES = {"api": "5/1h fixed_window", "wait": "1/1h"}


PROVIDERS = Providers.of(*({"domain": name, "limit": 5, "period": "1h"} for name in ("done", "held")))


class HeldStore(MemoryStore):
    """A store over a slow network: calls for one key or collection get no answer until they are released."""

    instant = False

    def __init__(self, held_key="held"):
        super().__init__()
        self.held_key = held_key
        self.released = asyncio.Event()
        self.held = 0

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        names = {name for policy, key, _ in asks for name in (key, policy.name)}
        if self.held_key in names | {write.collection.name for write in writes}:
            self.held += 1
            await self.released.wait()
        return self.apply(verb, asks, now, at, writes)


async def until(condition):
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    "words",
    [
        ("TG.ACQUIRE", "api", "KEY"),
        ("TG.RESERVE", "api", "KEY"),
        ("CL.THROTTLE", "KEY", 4, 1, 3600),
        ("TG.PROVIDER", "ACQUIRE", "KEY"),
    ],
    ids=["acquire", "reserve", "throttle", "provider"],
)
async def test_a_pipeline_without_replies_is_refunded(words):
    store = HeldStore()
    async with connected(GuardedStore(store), policies=POLICIES) as (service, client):
        gone = await service.connect()
        gate = AsyncGate(PROVIDERS, service.decider.store)
        service.decider.open_providers(gate)

        async def remaining():
            if words[0] == "CL.THROTTLE":
                return (await client.ask("CL.THROTTLE", "done", 4, 1, 3600, 0))[2]
            if words[0] == "TG.PROVIDER":
                return (await client.ask("TG.PROVIDER", "USAGE", "done"))[0][3]
            return (await client.ask("TG.USAGE", "api", "done"))[0][3]

        async def is_charged():
            return store.held and await remaining() == 4

        async def is_refunded():
            return not service.app.in_flight and await remaining() == 5

        gone.writer.write(
            b"".join(encode(*(key if word == "KEY" else word for word in words)) for key in ("done", "held"))
        )
        await until(is_charged)
        gone.close()
        await until(is_refunded)
        assert service.app.waiting == 0
        store.released.set()
        await gate.close()


async def test_the_permit_of_a_provider_is_returned_if_its_id_is_not_written():
    """The client disconnects while the service reads the secret that signs the id."""
    store = HeldStore(SECRETS.name)
    async with connected(GuardedStore(store), policies=POLICIES) as (service, client):
        gone = await service.connect()
        gate = AsyncGate(PROVIDERS, service.decider.store)
        service.decider.open_providers(gate)
        gone.writer.write(encode("TG.PROVIDER", "ACQUIRE", "done"))

        async def used():
            return (await client.ask("TG.PROVIDER", "USAGE", "done"))[0][2]

        async def is_charged():
            return store.held and await used() == 1

        async def is_refunded():
            return not service.app.in_flight and await used() == 0

        await until(is_charged)
        gone.close()
        await until(is_refunded)
        store.released.set()
        await gate.close()


async def test_the_commands_of_a_provider_in_a_pipeline_keep_their_order():
    store = HeldStore()
    async with connected(store, policies=POLICIES) as (service, client):
        gate = AsyncGate(PROVIDERS, service.decider.store)
        service.decider.open_providers(gate)
        client.writer.write(
            b"".join(encode("TG.PROVIDER", *words, "held") for words in (["ACQUIRE"], ["USAGE"], ["PEEK"]))
        )

        async def is_held():
            return store.held

        await until(is_held)
        assert store.held == 1  # USAGE and PEEK wait for the reply
        store.released.set()
        assert (await client.read())[:2] == [1, 4]
        assert (await client.read())[0][2] == 1
        assert (await client.read())[1] == 3
        await gate.close()


async def test_replies_that_were_sent_stay_charged():
    """The first command was answered before the client disconnected, as with pipelined HTTP requests."""
    store = HeldStore()
    async with connected(GuardedStore(store), policies=POLICIES) as (service, client):
        gone = await service.connect()
        gone.writer.write(encode("TG.RESERVE", "api", "done") + encode("TG.PEEK", "api", "held"))
        assert (await gone.read())[:2] == [1, 4]
        gone.close()

        async def is_idle():
            return not service.app.in_flight

        await until(is_idle)
        assert (await client.ask("TG.USAGE", "api", "done"))[0][3] == 4
        store.released.set()


async def test_each_part_of_a_pipeline_is_sent_and_timed_when_it_is_done():
    """A call that waits for a permit neither delays the replies before it, nor counts as their duration."""
    async with connected(policies=POLICIES) as (service, client):
        await client.ask("TG.ACQUIRE", "wait", "k")
        commands = [
            ("TG.ACQUIRE", "api", "first"),
            ("TG.ACQUIRE", "wait", "k", "TIMEOUT", "20"),
            ("TG.ACQUIRE", "api", "last"),
            ("TG.ACQUIRE", "api", "last"),
        ]
        client.writer.write(b"".join(encode(*words) for words in commands))
        assert (await client.read())[:2] == [1, 4]

        async def is_waiting():
            return service.decider.waiting

        await until(is_waiting)
        service.clock.advance(20)
        assert [(await client.read())[:2] for _ in range(3)] == [[0, 0], [1, 4], [1, 3]]
        metrics = (await service.http.get("/metrics")).text
        for verb, count, seconds in (("acquire", 2, "0.0"), ("acquire wait", 1, "20.0"), ("batch", 1, "0.0")):
            assert f'tidegate_request_seconds_count{{verb="{verb}"}} {count}\n' in metrics
            assert f'tidegate_request_seconds_sum{{verb="{verb}"}} {seconds}\n' in metrics
