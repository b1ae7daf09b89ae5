"""Shared by tests of the flow: a provider, a request, and stores that fail or wait on demand."""

import asyncio

import pytest

from tidegate import StoreUnavailable
from tidegate.outbound import OutboundRequest, Providers
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.stores import MemoryStore

START = 1_728_000_000  # a whole minute
CALL = OutboundRequest(
    "GET", "https://x.example/", {}.get, lambda: None, True, lambda error: isinstance(error, ConnectionError)
)


def providers(limit=10, period="1m", **more):
    return Providers.of({"domain": "x.example", "limit": limit, "period": period, **more})


def limited(*limits, **more):
    return Providers.of({"domain": "x.example", "limits": list(limits), **more})


def reply(status=200, headers=(), close=lambda: None):
    return ProviderResponse(status, headers, close, status)


def answer(gate, status=200, headers=(), call=CALL):
    """Send a request that is answered at once."""
    return gate.run(gate.send_flow(call, lambda _provider: reply(status, headers)))


def used(store, known, key="x.example"):
    """Tell what is in use of each limit."""
    policy = known.match("https://x.example").policy
    (peeked,) = store.apply("peek", ((policy, key, (0,) * len(policy.limits)),))
    return [said.limit.burst - said.remaining for said in peeked.limits]


def settle_tokens(gate, result, tokens):
    """Settle a response whose body reports this many tokens."""
    result.settlement.open()
    result.settlement.feed(b'{"usage": {"total_tokens": %d}}' % tokens)
    result.settlement.end()
    gate.run(result.settlement.settle_flow())


async def settle():
    """Let every task go as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


class Failing(MemoryStore):
    """Raises StoreUnavailable while `fail` is set."""

    fail = False

    def apply(self, *asked):
        if self.fail:
            raise StoreUnavailable("lost")
        return super().apply(*asked)

    def apply_one(self, *asked):
        if self.fail:
            raise StoreUnavailable("lost")
        return super().apply_one(*asked)


class FailingSettlements(MemoryStore):
    """Makes charges, and raises `error` when they are corrected."""

    error: Exception = StoreUnavailable("lost")

    def apply(self, verb, *asked):
        if verb == "adjust":
            raise self.error
        return super().apply(verb, *asked)

    def apply_one(self, verb, *asked):
        if verb == "adjust":
            raise self.error
        return super().apply_one(verb, *asked)


class Waiting(MemoryStore):
    """Delays the calls of tasks until the event `until` is set."""

    instant = False
    blocked = ""  # prefix of the names of the delayed policies, and of collections of values
    until = None

    async def apply_async(self, verb, asks, *rest):
        if asks:
            await self.wait_for(asks[0][0].name)
        return self.apply(verb, asks, *rest)

    async def get_value_async(self, collection, name, now=None):
        await self.wait_for(collection.name)
        return self.get_value(collection, name, now)

    async def wait_for(self, name):
        if self.until is not None and name.startswith(self.blocked):
            await self.until.wait()


class SlowStore(MemoryStore):
    """Answers after some iterations of the event loop. A correction is made even if its task is cancelled."""

    instant = False

    async def apply_async(self, verb, asks, *rest):
        decisions = self.apply(verb, asks, *rest)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if verb in ("acquire", "hold"):
                self.apply("adjust", [(policy, key, tuple(-cost for cost in costs)) for policy, key, costs in asks])
            raise
        return decisions


async def cancel_until_done(work):
    """Cancel a task at each step that it waits for."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
